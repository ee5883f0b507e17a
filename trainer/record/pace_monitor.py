"""Findings about ranks that slow a run down: data loading, and stragglers.

No torch here.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median_low

from trainer.health.findings import Action, Finding, Kind

STARVED_SHARE = 0.1
"""Data-loading stall as a share of step time, above which faster data loading is worth
the effort."""
STRAGGLER_RATIO = 1.25
"""Ratio of a rank's compute time to the median rank, above which it exceeds the usual
spread of GPUs and data."""
STREAK_ROWS = 5
"""Consecutive bad rows before a warning, and good ones before another: single rows are
often disturbed."""
_MAX_HOST_LENGTH = 64
"""Length to which a host's name is cut in messages: the longest that Linux allows."""


class PaceMonitor:
    """Finds slow data loading and stragglers in the logged rows, given in order."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._rows = 0
        self._starved = _Streak()
        self._slow: defaultdict[int, _Streak] = defaultdict(_Streak)

    def check(
        self,
        *,
        step_s: float,
        data_wait_s: Sequence[float],
        compute_s: Sequence[float | None],
    ) -> list[Finding]:
        """Return the findings of a row.

        Args:
            step_s: Time per step, in seconds.
            data_wait_s: Each rank's data wait per step, in seconds.
            compute_s: Each rank's compute time per step, in seconds; None if unknown.
        """
        self._rows += 1
        return [
            *self._check_data_loading(step_s, data_wait_s),
            *self._check_stragglers(compute_s),
        ]

    def _check_data_loading(
        self, step_s: float, data_wait_s: Sequence[float]
    ) -> list[Finding]:
        """Return a finding if a rank waited for data in ``STREAK_ROWS`` rows."""
        # DataLoader workers are still starting in the first rows.
        if self._rows <= STREAK_ROWS or step_s <= 0 or not data_wait_s:
            return []
        wait_s = max(data_wait_s)
        share = wait_s / step_s
        if not self._starved.add(is_bad=share > STARVED_SHARE):
            return []
        rank = data_wait_s.index(wait_s)
        return [
            Finding(
                kind=Kind.STARVED,
                action=Action.WARN,
                message=(
                    f"{self._named(rank)} waits for data {share:.0%} of the time:"
                    f" {wait_s:.4g} of {step_s:.4g} s per step"
                ),
                values={
                    "rank": float(rank),
                    "share": share,
                    "data_wait_s": wait_s,
                    "step_s": step_s,
                },
            )
        ]

    def _check_stragglers(self, compute_s: Sequence[float | None]) -> list[Finding]:
        """Return a finding on the slowest of the ranks that just became stragglers.

        A straggler was slow in ``STREAK_ROWS`` rows. The message names the others too.
        """
        known_s = [seconds for seconds in compute_s if seconds is not None]
        median_s = median_low(known_s) if known_s else 0.0
        if len(known_s) < len(compute_s) or median_s <= 0:
            return []
        ratios = [seconds / median_s for seconds in known_s]
        slow_ranks = []
        for rank, ratio in enumerate(ratios):
            if self._slow[rank].add(is_bad=ratio > STRAGGLER_RATIO):
                slow_ranks.append(rank)
        if not slow_ranks:
            return []
        slowest = max(slow_ranks, key=lambda rank: ratios[rank])
        message = (
            f"{self._named(slowest)} takes {ratios[slowest]:.2f} times the compute time"
            f" of the median rank: {known_s[slowest]:.4g} instead of {median_s:.4g} s"
            " per step; all others wait for it"
        )
        others = [str(rank) for rank in slow_ranks if rank != slowest]
        if others:
            message += f" (also slow: {', '.join(others)})"
        return [
            Finding(
                kind=Kind.STRAGGLER,
                action=Action.WARN,
                message=message,
                values={
                    "rank": float(slowest),
                    "ratio": ratios[slowest],
                    "compute_s": known_s[slowest],
                    "median_s": median_s,
                },
            )
        ]

    def _named(self, rank: int) -> str:
        """Return a rank with its host, if known."""
        if rank < len(self._hosts):
            return f"rank {rank} ({self._hosts[rank][:_MAX_HOST_LENGTH]})"
        return f"rank {rank}"


class _Streak:
    """Counter of consecutive bad rows.

    It triggers a warning after ``STREAK_ROWS`` of them, and another only after
    ``STREAK_ROWS`` good rows have followed.
    """

    def __init__(self) -> None:
        self._bad_rows = 0
        self._good_rows = 0
        self._warned = False

    def add(self, *, is_bad: bool) -> bool:
        """Count a row; return whether to warn."""
        if is_bad:
            self._bad_rows += 1
            self._good_rows = 0
        else:
            self._bad_rows = 0
            self._good_rows += 1
        had_warned = self._warned and self._good_rows < STREAK_ROWS
        self._warned = had_warned or self._bad_rows >= STREAK_ROWS
        return self._warned and not had_warned
