"""The log: lines for people, or a JSON object a line; repeats are counted instead of written again and again.

Whatever is logged says what happened as an event with fields, besides the words: ``log.warning("client %s is silent",
name, extra=about("client_silent", client=name))``. No bytes of prompts, no keys and no secrets belong there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, TextIO

from kvstore.clock import Clock, SystemClock
from kvstore.config import LogOptions

QUEUED_MAX = 4096
FLUSH_S_MAX = 2.0
KINDS_MAX = 1024
"""So many kinds of messages are told apart; the one not seen for longest is forgotten."""
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NO_EVENT = "message"

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""What clients call themselves must not write lines of the log, nor to its reader's terminal."""


def about(event: str, /, **fields: Any) -> dict[str, Any]:
    """What goes with a message as ``extra``: an event's name, the same for every message of its kind, and its facts."""
    return {"event": event, "fields": fields}


def set_up(options: LogOptions, stream: TextIO | None = None, clock: Clock | None = None) -> logging.Handler:
    """Log to ``stream`` (standard error) from now on, and nowhere else; returns what does it."""
    handler = LogThread(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if options.format == "json" else TextFormatter(TEXT_FORMAT))
    handler.addFilter(RepeatLimit(options.repeats_max, options.repeats_s, clock or SystemClock()))
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
        if isinstance(former, LogThread):
            former.close()
    root.addHandler(handler)
    for name, level in options.levels().items():
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)
    return handler


class LogThread(logging.Handler):
    """Writes lines on a thread of its own: whoever reads them may stall, which costs lines and nothing else.

    At most ``QUEUED_MAX`` lines wait. How many were lost is told with the next one that is written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | threading.Event | None] = queue.Queue(QUEUED_MAX)
        self._n_lost = 0
        self._thread = threading.Thread(target=self._write, name="kvstore-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks."""
        try:
            line = self.format(record)
            if self._n_lost and not self._lines.full():
                n_lost, self._n_lost = self._n_lost, 0
                self._lines.put_nowait(self.format(_lost(n_lost)))
            self._lines.put_nowait(line)
        except queue.Full:
            self._n_lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged before is written, for twice ``FLUSH_S_MAX`` at most."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put(written, timeout=FLUSH_S_MAX)
            written.wait(FLUSH_S_MAX)

    def close(self) -> None:
        """As ``flush``; nothing is written afterwards. Idempotent."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=FLUSH_S_MAX)
            self._thread.join(FLUSH_S_MAX)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._stream.write(f"{line}\n")
                self._stream.flush()


class RepeatLimit(logging.Filter):
    """Lets ``n_max`` messages of a kind pass in ``window_s``. The first of the next window says how many did not.

    Of a kind are messages of one logger and level with the same words, whatever values stand between them. May be
    called from any thread.
    """

    def __init__(self, n_max: int, window_s: float, clock: Clock) -> None:
        super().__init__()
        self._n_max = n_max
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, record.levelno, str(record.msg))
        now_s = self._clock.now_s()
        with self._lock:
            since_s, count = self._seen.pop(kind, (now_s, 0))
            if now_s - since_s >= self._window_s:
                record.suppressed = max(count - self._n_max, 0)
                since_s, count = now_s, 0
            self._seen[kind] = since_s, count + 1
            if len(self._seen) > KINDS_MAX:
                self._seen.popitem(last=False)
        if count + 1 == self._n_max:
            record.muted_s = since_s + self._window_s - now_s
        return count < self._n_max


def _lost(n_lost: int) -> logging.LogRecord:
    words = "%d messages were lost: whoever reads the log is too slow"
    record = logging.LogRecord("kvstore.logs", logging.WARNING, "", 0, words, (n_lost,), None)
    vars(record).update(about("messages_lost", messages=n_lost))
    return record


class TextFormatter(logging.Formatter):
    """A line for people."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's interface
        line = super().formatMessage(record).translate(_CONTROLS)
        if suppressed := getattr(record, "suppressed", 0):
            line += f" (and {suppressed} more like it before)"
        if (muted_s := getattr(record, "muted_s", None)) is not None:
            line += f" (more of this kind are only counted for {muted_s:.0f} s)"
        return line


class JsonFormatter(logging.Formatter):
    """One object, one line: ``ts`` (UTC), ``level``, ``logger``, ``event``, ``message``, ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", NO_EVENT),
            "message": record.getMessage(),
            "fields": getattr(record, "fields", {}),
        }
        if suppressed := getattr(record, "suppressed", 0):
            told["suppressed"] = suppressed
        if (muted_s := getattr(record, "muted_s", None)) is not None:
            told["muted_s"] = round(muted_s, 3)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        # Surrogates of odd file names included: a log must not fail.
        return json.dumps(told, default=str)
