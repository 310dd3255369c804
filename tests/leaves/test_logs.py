"""The log: lines for people or JSON, repeats counted, events with every message of this package."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.clock import ManualClock
from kvstore.config import LogOptions
from kvstore.logs import KINDS_MAX, QUEUED_MAX, JsonFormatter, LogThread, RepeatLimit, about, set_up

PACKAGE = Path(kvstore.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception"}


class Log:
    """What was written since ``set_up``."""

    def __init__(self, options: LogOptions) -> None:
        self.clock = ManualClock()
        self._stream = io.StringIO()
        self.handler = set_up(options, self._stream, self.clock)

    def lines(self) -> list[str]:
        self.handler.flush()
        return self._stream.getvalue().splitlines()

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def log_of() -> Iterator[Callable[..., Log]]:
    """``log_of(**options)``; everything is as it was afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    touched = {name: logging.getLogger(name).level for name in ("kvstore.x", "kvstore.y")}
    yield lambda **options: Log(LogOptions(**options))
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, former in touched.items():
        logging.getLogger(name).setLevel(former)
    logging.captureWarnings(False)


def test_json_is_one_object_a_line(log_of: Callable[..., Log]) -> None:
    log = log_of(format="json")
    logger = logging.getLogger("kvstore.x")
    logger.warning("client %s is\nsilent", 'a"b', extra=about("client_silent", client='a"b', silent_s=1.5))
    logger.info("plain \udcff %d", 3)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed", extra=about("failed", path=Path("/x")))
    first, second, third = log.objects()
    assert datetime.fromisoformat(first.pop("ts")).tzinfo is not None
    assert first == {
        "level": "warning", "logger": "kvstore.x", "event": "client_silent", "message": 'client a"b is\nsilent',
        "fields": {"client": 'a"b', "silent_s": 1.5},
    }  # fmt: skip
    assert (second["event"], second["fields"], second["message"]) == ("message", {}, "plain \udcff 3")
    assert third["fields"] == {"path": "/x"}
    assert "ValueError: broken" in third["exception"]


def test_text_is_for_people(log_of: Callable[..., Log]) -> None:
    log = log_of()
    logging.getLogger("kvstore.x").warning("client %s is silent", "c", extra=about("client_silent", client="c"))
    assert re.fullmatch(r"[\d-]+ [\d:,]+ WARNING kvstore\.x: client c is silent", log.lines()[0])


def test_names_that_clients_give_themselves_stay_on_their_line(log_of: Callable[..., Log]) -> None:
    log = log_of()
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kvstore.nvme").exception("client %s\x1b[2J failed", "a\nERROR forged")
    first, second, *_ = log.lines()
    assert first.endswith(r"client a\x0aERROR forged\x1b[2J failed")
    assert second.startswith("Traceback")


def test_each_logger_can_have_a_level_of_its_own(log_of: Callable[..., Log]) -> None:
    log = log_of(level="error,kvstore.nvme=debug", format="json")
    logging.getLogger("kvstore.nvme").debug("seen")
    logging.getLogger("kvstore.nvme.below").debug("seen")
    logging.getLogger("kvstore.y").warning("not seen")
    logging.getLogger("kvstore.y").error("seen")
    assert [each["message"] for each in log.objects()] == ["seen"] * 3


def test_setting_it_up_again_replaces_it(log_of: Callable[..., Log]) -> None:
    former, log = log_of(), log_of()
    logging.getLogger("kvstore.nvme").warning("once")
    assert former.lines() == []
    assert len(log.lines()) == 1


def test_repeats_are_counted_and_told_later(log_of: Callable[..., Log]) -> None:
    log = log_of(format="json", repeats_max=2, repeats_s=10.0)
    logger = logging.getLogger("kvstore.x")
    for number in range(5):
        logger.warning("client %d is silent", number)
    logger.error("client %d is silent", 9)  # of another kind
    assert [(each["message"], each.get("muted_s")) for each in log.objects()] == [
        ("client 0 is silent", None), ("client 1 is silent", 10.0), ("client 9 is silent", None),
    ]  # fmt: skip
    log.clock.advance(9.9)
    logger.warning("client %d is silent", 5)
    assert len(log.objects()) == 3
    log.clock.advance(0.1)
    logger.warning("client %d is silent", 6)
    assert log.objects()[-1]["message"] == "client 6 is silent"
    assert log.objects()[-1]["suppressed"] == 4
    logger.warning("client %d is silent", 7)
    assert "suppressed" not in log.objects()[-1]


def test_repeats_are_told_in_words_too(log_of: Callable[..., Log]) -> None:
    log = log_of(repeats_max=1, repeats_s=10.0)
    logger = logging.getLogger("kvstore.x")
    logger.warning("x")
    logger.warning("x")
    log.clock.advance(10.0)
    logger.warning("x")
    first, second = log.lines()
    assert first.endswith("x (more of this kind are only counted for 10 s)")
    assert "x (and 1 more like it before)" in second


class Stalled(io.StringIO):
    """A stream that takes nothing until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.go_on.wait(20)
        return super().write(text)


def test_a_reader_that_stalls_costs_lines_and_nothing_else() -> None:
    stream = Stalled()
    handler = LogThread(stream)
    handler.setFormatter(JsonFormatter())
    for number in range(QUEUED_MAX + 10):  # returns, though nothing is written
        handler.emit(logging.LogRecord("x", 20, "", 0, "message %d", (number,), None))
    stream.go_on.set()
    handler.flush()
    handler.emit(logging.LogRecord("x", 20, "", 0, "after", (), None))
    handler.close()
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert told[0]["message"] == "message 0"
    assert [each["event"] for each in told[-2:]] == ["messages_lost", "message"]
    lost = told[-2]["fields"]["messages"]
    assert 9 <= lost <= 10  # one line is in the writer's hands
    assert len(told) == QUEUED_MAX + 10 - lost + 2
    assert not handler._thread.is_alive()


def test_a_stream_that_is_closed_costs_nothing() -> None:
    stream = io.StringIO()
    handler = LogThread(stream)
    stream.close()
    handler.emit(logging.LogRecord("x", 20, "", 0, "unread", (), None))
    handler.close()
    assert not handler._thread.is_alive()


def test_kinds_that_are_told_apart_are_bounded() -> None:
    limit = RepeatLimit(1, 10.0, ManualClock())
    for number in range(KINDS_MAX + 50):
        assert limit.filter(logging.LogRecord("x", 20, "", 0, f"kind {number}", (), None))
    assert len(limit._seen) == KINDS_MAX
    assert not limit.filter(logging.LogRecord("x", 20, "", 0, f"kind {KINDS_MAX + 49}", (), None))


def calls_without_an_event(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if node.func.attr in LEVELS and isinstance(owner, ast.Name) and owner.id in ("log", "logger", "logging"):
            extra = [word.value for word in node.keywords if word.arg == "extra"]
            told = bool(extra) and isinstance(extra[0], ast.Call) and isinstance(extra[0].args[0], ast.Constant)
            if not told:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_every_message_of_the_daemon_names_its_event() -> None:
    """Commands and the bench talk to people, adapters in the engine's log; the daemon's is for machines, too."""
    folders = [
        each for each in PACKAGE.iterdir() if each.is_dir() and each.name not in ("bench", "cli", "engine_adapter")
    ]
    wanted = [*PACKAGE.glob("*.py"), *(path for folder in folders for path in folder.glob("**/*.py"))]
    assert any("nvme" in str(path) for path in wanted)
    missing = [each for path in wanted for each in calls_without_an_event(path)]
    assert not missing, "say extra=about(...): " + ", ".join(missing)
