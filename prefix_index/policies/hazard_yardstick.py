"""What LRU would have found with the same room, counted beside; where it finds more, its order is followed."""

from __future__ import annotations

import math

_LOSS_BEGINS, _LOSS_ENDS = 0.001, 0.0005
_CHANCE = 0.2
_CREDIT_MOST = 0.05
_ROOM_SHARE = 128
_MEMORY_SHARE = 32
_MEMORY_MIN_BLOCKS = 1 << 18


class LruYardstick:
    """Counts blocks by the request that used them last. The latest requests whose blocks fit into the room are what LRU
    would hold, of the one before them the first blocks. ``loses`` is whether more than a thousandth of the blocks
    accessed has been lost against it, and more than may be chance (0.2 standard deviations of the sum of all
    differences, and a 128th of the room), until half of the thousandth is made good."""

    def __init__(self) -> None:
        self.room_blocks = math.inf
        self.loses = False
        self._of_request: dict[int, int] = {}
        self._within = 0
        self._beyond = -1
        self._accessed = 0.0
        self._lost = 0.0
        self._squares = 0.0

    def __len__(self) -> int:
        """Requests whose blocks LRU would hold."""
        return len(self._of_request)

    def found(self, requests: list[int], n_blocks: list[int]) -> int:
        """How many of a path's blocks, of which so many each were used last by these requests (-1: none known), LRU
        would find before the first that it would not."""
        found, left = 0, max(self.room_blocks - self._within, 0)
        for request, n in zip(requests, n_blocks, strict=True):
            is_cut = 0 <= request == self._beyond
            if request < 0 or request < self._beyond or (is_cut and n > left):
                return found + (int(left) if is_cut else 0)
            found += n
            left -= n if is_cut else 0
        return found

    def moved(self, request: int, n_blocks: int) -> None:
        """Blocks are not those of this request any more."""
        had = self._of_request.get(request)
        if had is None:
            return
        self._within -= min(n_blocks, had)
        if had > n_blocks:
            self._of_request[request] = had - n_blocks
        else:
            del self._of_request[request]

    def used(self, request: int, n_blocks: int) -> None:
        """The latest request, or another that comes late, uses blocks."""
        of_request = self._of_request
        if request > self._beyond:
            of_request[request] = of_request.get(request, 0) + n_blocks
            self._within += n_blocks
        self._trim()

    def fit(self, room_blocks: float) -> None:
        """LRU has room for so many blocks from now on."""
        self.room_blocks = room_blocks
        self._trim()

    def _trim(self) -> None:
        of_request = self._of_request
        while self._within > self.room_blocks:
            oldest = next(iter(of_request))
            self._within -= of_request.pop(oldest)
            self._beyond = max(self._beyond, oldest)

    def count(self, n_accessed: int, n_found: int, n_lru: int) -> None:
        """Of so many blocks accessed so many were found, and LRU would have found so many."""
        self._accessed += n_accessed
        self._lost = max(self._lost + n_lru - n_found, -_CREDIT_MOST * self._accessed)
        self._squares += float(n_lru - n_found) ** 2
        room = self.room_blocks if self.room_blocks < math.inf else 0
        if self._accessed > max(_MEMORY_MIN_BLOCKS, _MEMORY_SHARE * room):
            self._accessed /= 2
            self._lost /= 2
            self._squares /= 4
        limit = _LOSS_ENDS if self.loses else _LOSS_BEGINS
        chance = _CHANCE * math.sqrt(self._squares) + room / _ROOM_SHARE
        self.loses = self._lost > limit * self._accessed + chance
