"""The work of the simulated device: what streams were given, run no earlier than somebody waits for it."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import BadInputError, DeviceError, KVStoreError

DEFAULT_STREAM = 0


@dataclass(slots=True, eq=False)
class Record:
    """A place in a stream that an event stands for."""

    stream: int
    over: bool = False


@dataclass(slots=True, eq=False)
class _Wait:
    """What follows in its stream begins after the record is over."""

    record: Record


_Item = Callable[[], object] | Record | _Wait


class Streams:
    """Streams and events by number; work runs on the thread that waits, without the lock that others give work under.

    Without a seed a wait runs just what it must, and the rest stays undone. With one, every other wait also lets
    streams run that nobody asked for, in a random order that events allow. So what is right only if streams happen
    to run in some order is wrong under some seed.

    A failure of work stays: every later call raises it, as a GPU's does.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)  # noqa: S311
        self._numbers = itertools.count(1)
        self._queues: dict[int, deque[_Item]] = {DEFAULT_STREAM: deque()}
        self._open = {DEFAULT_STREAM}
        self._events: dict[int, Record | None] = {}
        self._giving = threading.Lock()
        self._running = threading.Lock()
        self._failure: DeviceError | None = None

    def stream(self) -> int:
        """A new stream."""
        with self._giving:
            number = next(self._numbers)
            self._queues[number] = deque()
            self._open.add(number)
            return number

    def free_stream(self, stream: int) -> None:
        """Nothing more is given to it; what was is run when somebody needs it."""
        with self._giving:
            self._queue(stream)
            if stream == DEFAULT_STREAM:
                raise BadInputError("stream 0 is the default stream; it can't be freed")
            self._open.discard(stream)
            if not self._queues[stream]:
                del self._queues[stream]

    def event(self) -> int:
        """A new event."""
        with self._giving:
            number = next(self._numbers)
            self._events[number] = None
            return number

    def free_event(self, event: int) -> None:
        """End an event. Streams that wait for what it stood for still do."""
        with self._giving:
            self._recorded(event)
            del self._events[event]

    def give(self, stream: int, work: Callable[[], object]) -> None:
        """Queue work."""
        with self._giving:
            self._queue(stream).append(work)

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all that the stream was given until now, and for nothing else any more."""
        with self._giving:
            queue = self._queue(stream)
            self._recorded(event)
            record = self._events[event] = Record(stream)
            queue.append(record)

    def wait_event(self, stream: int, event: int) -> None:
        """Order a stream behind what an event stands for now."""
        with self._giving:
            queue = self._queue(stream)
            record = self._recorded(event)
            if record is not None and not record.over:
                queue.append(_Wait(record))

    def query(self, event: int) -> bool:
        """Whether an event is over, after one more piece of work towards it unless somebody runs work just now."""
        with self._giving:
            record = self._recorded(event)
        if record is None:
            return True
        if not record.over and self._running.acquire(blocking=False):
            try:
                if not record.over:
                    self._step(record, eager=False)
            finally:
                self._running.release()
        return record.over

    def sync_event(self, event: int) -> None:
        """Run what an event stands for."""
        with self._giving:
            record = self._recorded(event)
        if record is not None:
            self._finish(record)

    def sync_stream(self, stream: int) -> None:
        """Run all that a stream was given until now."""
        with self._giving:
            queue = self._queue(stream)
            record = Record(stream)
            queue.append(record)
        self._finish(record)

    def sync_all(self) -> None:
        """Run all that any stream was given until now."""
        with self._giving:
            records = []
            for stream, queue in self._queues.items():
                records.append(Record(stream))
                queue.append(records[-1])
        for record in records:
            self._finish(record)

    @property
    def failed(self) -> bool:
        """Whether earlier work failed, and whoever waited was told."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the failure of earlier work, if there was one."""
        if self._failure is not None:
            raise DeviceError(f"earlier work on the device failed, and it does nothing more: {self._failure}")

    def _finish(self, record: Record) -> None:
        with self._running:
            eager = self._random is not None and self._random.random() < 0.5
            while not record.over:
                self._step(record, eager)

    def _step(self, target: Record, eager: bool) -> None:
        """Run one item: the next towards ``target``, or any that can run. The caller holds ``_running``."""
        self.check()
        with self._giving:
            if eager and self._random is not None:
                stream = self._random.choice([number for number, queue in self._queues.items() if _can_run(queue)])
            else:
                stream = target.stream
                while isinstance(head := self._queues[stream][0], _Wait) and not head.record.over:
                    stream = head.record.stream
            item = self._queues[stream].popleft()
            if not self._queues[stream] and stream not in self._open:
                del self._queues[stream]
        if isinstance(item, Record):
            item.over = True
        elif not isinstance(item, _Wait):
            try:
                item()
            except KVStoreError as error:
                self._failure = DeviceError(str(error))
                raise self._failure from error

    def _queue(self, stream: int) -> deque[_Item]:
        if stream not in self._open:
            raise BadInputError(f"there is no stream {stream}; it was freed, or is another device's")
        return self._queues[stream]

    def _recorded(self, event: int) -> Record | None:
        if event not in self._events:
            raise BadInputError(f"there is no event {event}; it was freed, or is another device's")
        return self._events[event]


def _can_run(queue: deque[_Item]) -> bool:
    return bool(queue) and not (isinstance(queue[0], _Wait) and not queue[0].record.over)
