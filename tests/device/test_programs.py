"""Random programs of copies, fills and events on several streams, against an oracle that knows no streams.

A program is a list of steps, each on a stream. Every step that touches bytes which an earlier one on another stream
touched waits for that one's event, so that there is one right answer: that of the steps in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.device import Device, PinnedBuffer
from kvstore.device.simulated import SimulatedDevice

BUFFER_BYTES = 96
N_DEVICE, N_HOST, N_STREAMS = 3, 2, 3
N_BUFFERS = N_DEVICE + N_HOST
"""The device's own first, then the host's."""


@dataclass(frozen=True)
class Step:
    """Copies ``pieces`` of ``(dst, src, size)``, or fills; places are bytes counted through all buffers."""

    stream: int
    pieces: tuple[tuple[int, int, int], ...]
    byte: int | None = None

    def written(self) -> set[int]:
        return {at for dst, _, size in self.pieces for at in range(dst, dst + size)}

    def read(self) -> set[int]:
        if self.byte is not None:
            return set()
        return {at for _, src, size in self.pieces for at in range(src, src + size)}


def spans(n_buffers: int) -> st.SearchStrategy[tuple[int, int]]:
    """Where some bytes begin, and how many they are, inside one buffer."""
    return st.tuples(st.integers(0, n_buffers - 1), st.integers(0, BUFFER_BYTES - 1), st.integers(0, BUFFER_BYTES)).map(
        lambda t: (t[0] * BUFFER_BYTES + t[1], min(t[2], BUFFER_BYTES - t[1]))
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    stream = draw(st.integers(0, N_STREAMS - 1))
    if draw(st.integers(0, 3)) == 0:
        at, size = draw(spans(N_DEVICE))
        return Step(stream, ((at, 0, size),), draw(st.integers(0, 255)))
    pieces: list[tuple[int, int, int]] = []
    written: set[int] = set()
    read: set[int] = set()
    for _ in range(draw(st.integers(1, 4))):
        (dst, dst_size), (src, src_size) = draw(spans(N_BUFFERS)), draw(spans(N_BUFFERS))
        size = min(dst_size, src_size)
        to, of = set(range(dst, dst + size)), set(range(src, src + size))
        if not (to & (written | read | of) or of & written):
            pieces.append((dst, src, size))
            written |= to
            read |= of
    return Step(stream, tuple(pieces))


def expected(program: list[Step], start: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """All buffers after the steps, one after the other."""
    state = start.copy()
    for step in program:
        before = state.copy()
        for dst, src, size in step.pieces:
            state[dst : dst + size] = step.byte if step.byte is not None else before[src : src + size]
    return state


class Run:
    """A program on a device, step by step. ``state`` is all buffers, one after the other."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.streams = [device.stream() for _ in range(N_STREAMS)]
        self.own = [device.malloc(BUFFER_BYTES) for _ in range(N_DEVICE)]
        self.host = [PinnedBuffer(device, BUFFER_BYTES) for _ in range(N_HOST)]
        self.outside = PinnedBuffer(device, N_BUFFERS * BUFFER_BYTES)
        self.bases = [*self.own, *(buffer.address for buffer in self.host)]
        self.done: list[tuple[Step, int]] = []

    def at(self, place: int) -> int:
        return self.bases[place // BUFFER_BYTES] + place % BUFFER_BYTES

    def set_state(self, state: NDArray[np.uint8]) -> None:
        self.outside.array[:] = state
        for i, base in enumerate(self.bases):
            self.device.copy(base, self.outside.address + i * BUFFER_BYTES, BUFFER_BYTES, 0)
        self.device.sync_stream(0)

    def state(self) -> NDArray[np.uint8]:
        for i, base in enumerate(self.bases):
            self.device.copy(self.outside.address + i * BUFFER_BYTES, base, BUFFER_BYTES, 0)
        self.device.sync_stream(0)
        return self.outside.array.copy()

    def give(self, step: Step, waits: bool) -> None:
        stream = self.streams[step.stream]
        for earlier, event in self.done if waits else []:
            meets = step.written() & (earlier.written() | earlier.read()) or step.read() & earlier.written()
            if earlier.stream != step.stream and meets:
                self.device.wait_event(stream, event)
        if step.byte is not None:
            ((dst, _, size),) = step.pieces
            self.device.fill(self.at(dst), step.byte, size, stream)
        elif len(step.pieces) == 1:
            ((dst, src, size),) = step.pieces
            self.device.copy(self.at(dst), self.at(src), size, stream)
        else:
            rows = [[self.at(dst), self.at(src), size] for dst, src, size in step.pieces]
            dsts, srcs, sizes = np.array(rows, np.uint64).reshape(-1, 3).T
            self.device.copy_batch(dsts, srcs, sizes, stream)
        self.done.append((step, self.device.event()))
        self.device.record(self.done[-1][1], stream)

    def wait(self) -> None:
        """The last step first, in three ways in turn."""
        for i, (step, event) in enumerate(reversed(self.done)):
            if i % 3 == 0:
                self.device.sync_event(event)
            elif i % 3 == 1:
                self.device.sync_stream(self.streams[step.stream])
            else:
                while not self.device.query(event):
                    pass

    def end(self) -> None:
        for buffer in (*self.host, self.outside):
            buffer.close()
        for address in self.own:
            self.device.free(address)
        for stream in self.streams:
            self.device.free_stream(stream)
        for _, event in self.done:
            self.device.free_event(event)


def run(device: Device, program: list[Step], start: NDArray[np.uint8], missing: int | None = None) -> NDArray[np.uint8]:
    """All buffers after the program; step ``missing`` does not wait for others."""
    running = Run(device)
    running.set_state(start)
    for i, step in enumerate(program):
        running.give(step, waits=i != missing)
    running.wait()
    state = running.state()
    running.end()
    return state


START = np.random.default_rng(3).integers(0, 256, N_BUFFERS * BUFFER_BYTES, np.uint8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(program=st.lists(steps(), max_size=20))
def test_a_program_with_its_events_has_one_answer(device: Device, program: list[Step]) -> None:
    assert np.array_equal(run(device, program, START), expected(program, START))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@settings(max_examples=40)
@given(program=st.lists(steps(), max_size=20))
def test_the_answer_is_the_same_under_every_seed(seed: int | None, program: list[Step]) -> None:
    device = SimulatedDevice(seed=seed)
    assert np.array_equal(run(device, program, START), expected(program, START))
    device.close()


def test_the_programs_find_a_missing_wait() -> None:
    """Of two steps that meet on different streams, the second without its wait: seen under some seed, both ways."""
    fill, read = Step(0, ((0, 0, 8),), 1), Step(1, ((BUFFER_BYTES, 0, 8),))
    for program in ([fill, read], [read, fill]):
        right = expected(program, START)
        for missing in (None, 1):
            devices = [SimulatedDevice(seed=seed) for seed in range(20)]
            wrong = [not np.array_equal(run(device, program, START, missing), right) for device in devices]
            for device in devices:
                device.close()
            assert any(wrong) == (missing is not None)
