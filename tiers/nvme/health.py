"""Whether something that failed may be tried again: at first soon, then at ever longer intervals."""

from __future__ import annotations

import errno

from kvstore.clock import Clock

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0

OK, FULL, FAILING = "ok", "full", "failing"
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)


class Health:
    """``state`` is "ok", "full" or "failing", as the last attempt ended."""

    def __init__(self, clock: Clock) -> None:
        self.state = OK
        self._clock = clock
        self._retry_at_s = 0.0
        self._delay_s = 0.0

    @property
    def may_try(self) -> bool:
        """False while it is too early for another attempt."""
        return self.state == OK or self._clock.now_s() >= self._retry_at_s

    def succeeded(self) -> None:
        """The last attempt went well."""
        self.state = OK
        self._delay_s = 0.0

    def failed(self, full: bool) -> None:
        """The last attempt failed, for lack of room or otherwise."""
        self.state = FULL if full else FAILING
        self._delay_s = min(max(2 * self._delay_s, RETRY_S_MIN), RETRY_S_MAX)
        self._retry_at_s = self._clock.now_s() + self._delay_s


def means_full(code: int) -> bool:
    """Whether an errno says that there is no room."""
    return code in _FULL_CODES
