"""Who makes the copies between blocks of the store and an engine's pages: the processor here, or a device (``gpu/``).

A job asks a ``Mover`` for its ``Moves``. What a device is given is not over when ``copy`` returns: marks say when it
is, and until then the moves keep what they read from and write to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.client.hbm import HbmHeld, IpcDevice
from kvstore.engine_adapter.runs import Runs, copy_many
from kvstore.errors import BadInputError


class Copy(NamedTuple):
    """Runs between two planes: one of a block, one of the engine, at these addresses."""

    runs: Runs
    to: int
    come_from: int


def always() -> bool:
    """Go on."""
    return True


class Moves(Protocol):
    """The copies of one job, all in one direction. One thread calls ``keep``, ``copy`` and ``mark``, any the rest."""

    def keep(self, *things: object) -> None:
        """What must live until the copies are over."""
        ...

    def keep_hbm(self, held: HbmHeld) -> None:
        """As ``keep``; addresses of these blocks may be copied from: they are the device's own."""
        ...

    def after(self, stream: int | None) -> None:
        """Copies given from now on come after all that the engine's stream was given until now. None: after nothing."""
        ...

    def copy(self, copies: Sequence[Copy], going: Callable[[], bool] = always) -> bool:
        """Make copies, or give them to the device in their order; blocks for the room that they need.

        ``going`` is asked in between. False if it said no: then not all were made.
        """
        ...

    def mark(self) -> int | None:
        """A point after all copies until now; None if they are over already. Owned by the moves."""
        ...

    def sync(self, mark: int | None) -> None:
        """Block until a point is reached. Raises DeviceError if the device failed."""
        ...

    def reached(self, mark: int | None) -> bool:
        """Whether a point is reached. Does not block."""
        ...

    def let_wait(self, stream: int, mark: int | None) -> None:
        """What the engine's stream is given from now on comes after a point. Does not block."""
        ...

    def settle(self) -> None:
        """Block until all copies that were made or given are over, and let go of what was kept. Idempotent.

        Raises DeviceError if the device failed: nobody knows then what it still does, and what was kept stays so.
        """
        ...


class Mover(Protocol):
    """Makes moves; may be used by any thread."""

    on_device: bool
    """Whether the engine's pages lie on a device."""

    def reads_hbm(self, device: IpcDevice | None) -> bool:
        """Whether loads can read blocks in HBM that were opened with this device."""
        ...

    def loading(self) -> Moves:
        """From blocks into pages."""
        ...

    def storing(self) -> Moves:
        """From pages into blocks."""
        ...


class HostMoves:
    """Copies by the processor: over when ``copy`` returns."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def keep(self, *things: object) -> None:
        """See ``Moves``."""

    def keep_hbm(self, held: HbmHeld) -> None:
        """See ``Moves``: not for the processor. Raises BadInputError."""
        raise BadInputError(f"{len(held)} blocks are in HBM, which the processor can't read: lease them without hbm")

    def after(self, stream: int | None) -> None:
        """See ``Moves``: the engine says itself when its memory is ready."""

    def copy(self, copies: Sequence[Copy], going: Callable[[], bool] = always) -> bool:  # noqa: ARG002
        """See ``Moves``; as one batch."""
        copy_many(copies, self._threads)
        return True

    def mark(self) -> int | None:
        """See ``Moves``."""
        return None

    def sync(self, mark: int | None) -> None:
        """See ``Moves``."""

    def reached(self, mark: int | None) -> bool:  # noqa: ARG002
        """See ``Moves``."""
        return True

    def let_wait(self, stream: int, mark: int | None) -> None:
        """See ``Moves``."""

    def settle(self) -> None:
        """See ``Moves``."""


class HostMover:
    """See ``Mover``: pages in memory of this process, copied by ``threads``."""

    on_device = False

    def reads_hbm(self, device: IpcDevice | None) -> bool:  # noqa: ARG002
        """See ``Mover``."""
        return False

    def __init__(self, threads: int = 1) -> None:
        self._moves = HostMoves(threads)

    def loading(self) -> Moves:
        """See ``Mover``."""
        return self._moves

    def storing(self) -> Moves:
        """See ``Mover``."""
        return self._moves


HERE = HostMoves()
