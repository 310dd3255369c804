"""An engine in a process of its own: told what to do in JSON on its command line, writes what came out to a file.

``{"model", "socket", "options", "settings", "rounds": [[prompt, ...], ...], "n", "die_in_layer", "answer"}``; with
``die_in_layer`` the process kills itself while it saves that layer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.engines.engine import Engine


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    socket = Path(told["socket"]) if told["socket"] else None
    with Engine(Path(told["model"]), socket, told["options"], **told["settings"]) as engine:
        if told["die_in_layer"] is not None:
            die_while_saving(engine, told["die_in_layer"])
        said = []
        for prompts in told["rounds"]:
            said.append(engine.generate(prompts, told["n"]))
            engine.drain()
            engine.forget()
        # One more step carries what was counted last.
        engine.generate([[5, 6, 7]], 1)
        metrics = {metric.name: metric.value for metric in engine.llm.get_metrics() if hasattr(metric, "value")}
        Path(told["answer"]).write_text(json.dumps({"said": said, "metrics": metrics}))


def die_while_saving(engine: Engine, layer: int) -> None:
    worker = engine.worker_connector._worker
    assert worker is not None
    paged: Any = worker._paged
    save = paged.save

    def last(number: int, *rest: Any) -> None:
        save(number, *rest)
        if number == layer:
            os.kill(os.getpid(), signal.SIGKILL)

    paged.save = last


if __name__ == "__main__":
    main()
