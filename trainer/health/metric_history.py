"""Usual values of a metric, and the limit above which a value is unusual.

Pure, no torch here.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainer.formats.train_config import HealthSettings, Policy
from trainer.health.findings import Action, Kind
from trainer.health.robust_statistics import level_and_scatter

MIN_EXCESS_SHARE = 0.1
"""Smallest excess of the limit over the median, as a share of the median: late in a
run, the sigmas of the loss are so small that harmless changes would exceed them."""
REQUIRED_VALUES = 16
"""Smallest number of values from which a limit is derived, unless the window holds
fewer; before, the limit is infinite."""


class MetricHistory:
    """Window of a metric's last usual values, from which its limit is derived."""

    def __init__(
        self,
        settings: HealthSettings,
        *,
        key: str,
        name: str,
        kind: Kind,
        policy: Policy,
        min_limit: float,
        saved: Mapping[str, Any],
    ) -> None:
        """Start from a saved history, which may be empty.

        Args:
            settings: Length of the window, and number of sigmas from the median to the
                limit.
            key: Key of the metric in the values of a finding.
            name: Name of the metric in messages.
            kind: Kind of finding on an unusual value.
            policy: Response to an unusual value.
            min_limit: Smallest limit.
            saved: History as ``to_json`` returned it.
        """
        self.key = key
        self.name = name
        self.kind = kind
        self.guarded = policy != "warn"
        """True if the device skips a step with an unusual value."""
        self.in_excursion: bool = saved.get("excursion", False)
        """True from a reported unusual value until the next usual one; only with the
        policy ``warn``."""
        self._policy = policy
        self._sigmas = settings.spike_sigmas
        self._min_limit = min_limit
        self._required_values = min(REQUIRED_VALUES, settings.window_steps)
        self._window: deque[float] = deque(
            saved.get("window", ()), maxlen=settings.window_steps
        )
        self._derive_limit()

    @property
    def device_limit(self) -> float:
        """Limit above which the device skips an update; infinite if it never does."""
        return self.limit if self.guarded else math.inf

    def limit_text(self) -> str:
        """Return the limit as messages show it."""
        return (
            f"{self.limit:.4g}; the median of the last {len(self._window)} steps is"
            f" {self.median:.4g}"
        )

    def limit_values(self) -> dict[str, float]:
        """Return the numbers behind the limit; none before there are enough values."""
        if math.isnan(self.median):
            return {}
        return {"median": self.median, "limit": self.limit}

    def share_of_limit(self, value: float) -> float:
        """Return a value as a share of the limit; 1 if the limit is 0."""
        return value / self.limit if self.limit > 0 else 1.0

    def judge(self, value: float, *, applied: bool) -> Action | None:
        """Judge the value of a step, and note whether it begins or ends an excursion.

        Args:
            value: Value of the step; finite.
            applied: Whether the device has applied the update of the step.

        Returns:
            The action, or None if the value is usual, or if its excursion was reported
            already.
        """
        if value <= self.limit:
            self.in_excursion = False
            return None
        match self._policy:
            case "rollback":
                return Action.ROLL_BACK
            case "skip":
                # The device's limit is some steps old and can let through a value above
                # the current one.
                return Action.WARN if applied else Action.SKIP
            case "warn":
                was_reported = self.in_excursion
                self.in_excursion = True
                return None if was_reported else Action.WARN

    def add(self, value: float) -> None:
        """Add a value to the window, and derive the limit again."""
        self._window.append(value)
        self._derive_limit()

    def to_json(self) -> dict[str, Any]:
        """Return the history as JSON values, under the keys of checkpoints."""
        return {"window": list(self._window), "excursion": self.in_excursion}

    def _derive_limit(self) -> None:
        """Derive the median and the limit from the window."""
        self.median = math.nan
        """Level of the window, which is its median unless values fall; NaN before there
        are enough values."""
        self.limit = math.inf
        """Limit above which a value is unusual; infinite before there are enough
        values."""
        if len(self._window) < self._required_values:
            return
        self.median, sigma = level_and_scatter(list(self._window))
        excess = max(self._sigmas * sigma, MIN_EXCESS_SHARE * abs(self.median))
        self.limit = max(self.median + excess, self._min_limit)
