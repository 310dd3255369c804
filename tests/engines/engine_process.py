"""An engine in a process of its own: told what to do in JSON on its command line, writes what came out to a file.

``{"model", "socket", "options", "settings", "rounds": [[prompt, ...], ...], "n", "more", "die", "answer"}``. With
``die`` (``["save", 2]``) the process kills itself in the middle of the first save, or load, after that layer. ``more``
goes into every prompt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from kvstore.bench.vllm_engine import Engine


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    socket = Path(told["socket"]) if told["socket"] else None
    with Engine(Path(told["model"]), socket, told["options"], **told["settings"]) as engine:
        if told["die"] is not None:
            die_while_copying(engine, *told["die"])
        said = []
        for prompts in told["rounds"]:
            said.append(engine.generate(prompts, told["n"], more=told["more"]))
            engine.drain()
            engine.forget()
        # One more step carries what was counted last.
        engine.generate([[5, 6, 7]], 1)
        metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
        Path(told["answer"]).write_text(json.dumps({"said": said, "metrics": metrics}))


def die_while_copying(engine: Engine, way: str, layer: int) -> None:
    worker = engine.worker_connector._worker
    assert worker is not None
    paged: Any = worker._paged
    copy = getattr(paged, way)

    def last(number: int, *rest: Any) -> Any:
        done = copy(number, *rest)
        if number == layer:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(paged, way, last)


if __name__ == "__main__":
    main()
