"""The sizes of a probe as trials of an Optuna study.

The value of a trial is the throughput that the curve has at its size. A size that ran
out of memory failed. One that fits, but is not on the curve, is pruned.
"""

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.evidence.probe import ProbeEvidence
from autotune.memory.size_probe import SizeProbe
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured, Outcome, OutOfMemory, describe
from autotune.trials.study import PositiveIntegers, TuningStudy, open_study

if TYPE_CHECKING:
    import optuna


@dataclass(slots=True, kw_only=True)
class SizeStudy:
    """Study of the sizes of a probe."""

    study: TuningStudy
    probe: SizeProbe
    _trial_by_size: "dict[int, optuna.Trial]" = field(default_factory=dict)
    """Trials of sizes that have begun and not ended."""
    _outcomes: dict[int, str] = field(default_factory=dict)
    """Last outcome of each size, in words."""
    _figures: dict[int, StepFigures] = field(default_factory=dict)
    """Figures of the last trial of the search, by size."""

    def begin(self, size: int) -> None:
        """Begin the trial of a size, unless it is running."""
        if size in self._trial_by_size:
            return
        name = self.probe.subject.size.name
        # A size of the curve may exceed the limit of the search by a multiple.
        most = max(self.probe.max_size, size)
        values = {name: PositiveIntegers(least=1, most=most)}
        self._trial_by_size[size] = self.study.ask(values, {name: size})

    def note(self, size: int, outcome: Outcome) -> None:
        """Note what a trial showed about a size: one of the search, or a failed one."""
        self._outcomes[size] = describe(outcome)
        if isinstance(outcome, Measured):
            self._figures[size] = StepFigures.of(outcome)
        if isinstance(outcome, OutOfMemory):
            self._fail(size, describe(outcome))

    def end(self, evidence: ProbeEvidence, chosen: int) -> None:
        """End all trials with the result of the probe.

        Args:
            evidence: Result of the probe.
            chosen: The chosen size.
        """
        points = {point.size: point for point in evidence.curve}
        self.study.note(
            {
                "memory_budget_bytes": self.probe.memory_budget_bytes,
                "feasible_max": evidence.feasible_max,
                "infeasible_min": evidence.infeasible_min,
                "chosen": chosen,
            }
        )
        for size, trial in list(self._trial_by_size.items()):
            attributes = self._measured(size)
            point = points.get(size)
            if point is None and size in self._figures:
                attributes["outcome"] = "fits; throughput not measured"
                self.study.tell(trial, state="pruned", attributes=attributes)
            elif point is not None:
                attributes |= {
                    "outcome": "chosen" if size == chosen else "fits",
                    "step_s": point.step_s,
                    "units_per_s_low": point.units_per_s_low,
                    "units_per_s_high": point.units_per_s_high,
                }
                if size == chosen and evidence.sustained is not None:
                    sustained = evidence.sustained.units_per_s
                    attributes["sustained_units_per_s"] = sustained
                self.study.tell(trial, point.units_per_s, attributes=attributes)
            else:
                self._fail(size, self._outcomes.get(size, "no time was left"))
        self._trial_by_size.clear()

    def fail_running(self) -> None:
        """End the trials that are running as failed, with their last outcome."""
        for size in list(self._trial_by_size):
            self._fail(size, self._outcomes.get(size, "interrupted"))

    def _fail(self, size: int, outcome: str) -> None:
        trial = self._trial_by_size.pop(size, None)
        if trial is not None:
            attributes = self._measured(size) | {"outcome": outcome}
            self.study.tell(trial, state="failed", attributes=attributes)

    def _measured(self, size: int) -> dict[str, object]:
        """Return attributes that the search measured."""
        attributes: dict[str, object] = {"configuration": self.probe.words(size)}
        figures = self._figures.get(size)
        if figures is not None:
            attributes |= {
                "peak_bytes": figures.peak_bytes,
                "search_step_s": statistics.median(figures.step_s),
            }
        return attributes


def open_size_study(probe: SizeProbe) -> SizeStudy:
    """Open the study of a probe.

    Raises:
        BadInput: If its file cannot be used.
    """
    study = open_study(
        probe.study_name, file=probe.study_file, unit=probe.subject.size.unit
    )
    return SizeStudy(study=study, probe=probe)
