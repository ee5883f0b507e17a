"""Loaders that starve the devices, and ranks that all others wait for. Pure, no torch here."""

import statistics
from collections.abc import Sequence

from trainer.events import Action, Finding, Kind

STARVED_SHARE = 0.1
"""Of a step's time that some rank waits for its loader; from there on faster loading is worth the trouble."""
STRAGGLER_RATIO = 1.25
"""A rank's computing time over the median of all ranks; less is the ordinary scatter of cards and data."""
ROWS = 5
"""Logged rows in a row before it is said, and of calm before it is said again: single rows are often disturbed."""


class PaceMonitor:
    """Looks at every logged row, in order."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._rows = 0
        self._starved = _Streak()
        self._slow: dict[int, _Streak] = {}

    def look(self, *, step_s: float, data_wait_s: Sequence[float], compute_s: Sequence[float | None]) -> list[Finding]:
        """What a row shows.

        Beside a step's wall time, the parts of it in which each rank waited for its loader, and went forward and
        backward; None where that cannot be told.
        """
        self._rows += 1
        return [*self._starvation(step_s, data_wait_s), *self._stragglers(compute_s)]

    def _starvation(self, step_s: float, data_wait_s: Sequence[float]) -> list[Finding]:
        # Loader processes are still starting in the first rows.
        if self._rows <= ROWS or step_s <= 0 or not data_wait_s:
            return []
        wait_s = max(data_wait_s)
        share = wait_s / step_s
        if not self._starved.look(share > STARVED_SHARE):
            return []
        rank = data_wait_s.index(wait_s)
        message = f"{self._named(rank)} waits for its loader {share:.0%} of the time: "
        message += f"{wait_s:.4g} of {step_s:.4g} s per step"
        values = {"rank": float(rank), "share": share, "data_wait_s": wait_s, "step_s": step_s}
        return [Finding(kind=Kind.STARVED, action=Action.WARN, message=message, values=values)]

    def _stragglers(self, compute_s: Sequence[float | None]) -> list[Finding]:
        """The slowest of the ranks that have just been slow for long enough, and the names of the others."""
        known_s = [seconds for seconds in compute_s if seconds is not None]
        median_s = statistics.median_low(known_s) if known_s else 0.0
        if len(known_s) < len(compute_s) or median_s <= 0:
            return []
        ratios = [seconds / median_s for seconds in known_s]
        told = [
            rank
            for rank, ratio in enumerate(ratios)
            if self._slow.setdefault(rank, _Streak()).look(ratio > STRAGGLER_RATIO)
        ]
        if not told:
            return []
        slowest = max(told, key=ratios.__getitem__)
        others = ", ".join(str(rank) for rank in told if rank != slowest)
        message = f"{self._named(slowest)} computes {ratios[slowest]:.2f} times as long as the median rank: "
        message += f"{known_s[slowest]:.4g} against {median_s:.4g} s per step; all others wait for it"
        message += f" (slow as well: {others})" if others else ""
        values = {"rank": float(slowest), "ratio": ratios[slowest], "compute_s": known_s[slowest], "median_s": median_s}
        return [Finding(kind=Kind.STRAGGLER, action=Action.WARN, message=message, values=values)]

    def _named(self, rank: int) -> str:
        """With its host, where people go and look."""
        return f"rank {rank} ({self._hosts[rank][:64]})" if rank < len(self._hosts) else f"rank {rank}"


class _Streak:
    """Whether something is to be said now: it was bad for long enough, and was not said since it was last fine."""

    def __init__(self) -> None:
        self._bad_rows = 0
        self._fine_rows = 0
        self._is_told = False

    def look(self, is_bad: bool) -> bool:
        self._bad_rows = self._bad_rows + 1 if is_bad else 0
        self._fine_rows = 0 if is_bad else self._fine_rows + 1
        if self._fine_rows >= ROWS:
            self._is_told = False
        if self._is_told or self._bad_rows < ROWS:
            return False
        self._is_told = True
        return True
