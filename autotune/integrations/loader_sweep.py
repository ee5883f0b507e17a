"""Sweep of your own loader, as for the trainer's loader.

It finds the fewest workers that keep up with the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import AutotuneError, BadInput, Undecided
from autotune.evidence.workers import LoaderEvidence, LoaderRow
from autotune.integrations.values import (
    LoaderSweep,
    OwnLoaderFigures,
    OwnLoaderRequest,
)
from autotune.subjects.bench import OwnBench
from autotune.subjects.decide import crash_words
from autotune.trials.outcomes import Crashed, Measured, Outcome, TimedOut
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial
from autotune.workers.count_evidence import count_evidence_fields, count_row_fields
from autotune.workers.count_sweep import CountSweep
from autotune.workers.decide.count_statistics import Count
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.gpu_figures import gpu_source

_PREFETCH_FACTOR = 2
"""Torch's default."""


@dataclass(slots=True, kw_only=True)
class OwnSweep(CountSweep[OwnLoaderFigures]):
    """Measure numbers of workers of your own loader."""

    asked: LoaderSweep
    bench: OwnBench

    @property
    def limits(self) -> LoaderLimits:
        """Limits of the workers, by the batches that were seen so far."""
        batch_bytes = (figures.batch_bytes for figures in self.all_windows)
        return LoaderLimits(
            host=self.bench.site.host,
            local_ranks=1,
            batch_bytes=max(batch_bytes, default=0),
            prefetch_factor=_PREFETCH_FACTOR,
            requested_workers=self.asked.max_workers,
        )

    def window_trial(
        self, count: Count, round_number: int, names: Sequence[str]
    ) -> Trial:
        """Return the trial of a window with ``count`` workers; None caches batches."""
        asked, subject = self.asked, self.bench.subject
        assert (
            asked.code.loader_function is not None and subject.loader_sha256 is not None
        )
        request = OwnLoaderRequest(
            loader=asked.code.loader_function,
            step=None if asked.step_time_s is not None else asked.code.step_function,
            arguments=dict(asked.code.arguments),
            source_sha256=subject.loader_sha256,
            device=self.bench.site.device,
            num_workers=count or 0,
            cached=count is None,
            round=round_number,
            interleaved_with=list(names),
            window_s=asked.window_s,
            step_time_s=asked.step_time_s,
        )
        return self.bench.trial(request, asked.trial_timeout_s)

    def read_figures(self, outcome: Measured) -> OwnLoaderFigures:
        """Return the figures of a window that was measured."""
        return OwnLoaderFigures.of(outcome)

    def known_failure(self, label: str, outcome: Outcome) -> AutotuneError | None:
        """Return an error for a failure of your code; None for other outcomes."""
        functions = " or ".join(self.asked.code.code().values())
        if isinstance(outcome, Crashed):
            next_step = "Fix it, and run the same command again: it resumes."
            if "num_workers > 0" in outcome.detail:
                next_step = (
                    "No workers are tried, too: write persistent_workers=num_workers >"
                    " 0, and so for its like."
                )
            crash = crash_words(outcome.detail, f" in the window {label!r}")
            return BadInput(f"{functions} {crash}", next_step=next_step)
        if isinstance(outcome, TimedOut):
            return Undecided(
                f"{functions} did not end within its time limit in the window"
                f" {label!r}: {outcome.detail}",
                next_step=(
                    "Allow more time with --trial-timeout; or mend the hang at that"
                    " place."
                ),
            )
        return None


def sweep_loader(
    asked: LoaderSweep, bench: OwnBench, runner: TrialRunner
) -> LoaderEvidence:
    """Find the fewest workers that keep up with the step.

    Raises:
        Undecided: If a window failed.
    """
    sweep = OwnSweep(asked=asked, bench=bench, runner=runner, budget_s=asked.budget_s)
    choice = sweep.run()
    rows = []
    for count in sweep.counts:
        windows = sweep.windows_with(count)
        rows.append(
            LoaderRow(
                **count_row_fields(sweep, choice, count),
                batches_per_s=[window.tokens_per_s for window in windows],
                processes=max(window.processes for window in windows),
            )
        )
    every = sweep.all_windows
    return LoaderEvidence(
        **count_evidence_fields(sweep, choice),
        rows=rows,
        replayed_step_s=asked.step_time_s,
        cached_batches_per_s=[
            window.tokens_per_s for window in sweep.windows_with(None)
        ],
        worker_bytes=sweep.worker_bytes,
        window_s=asked.window_s,
        batch_bytes=max(one.batch_bytes for one in every),
        epoch_batches=max(
            (one.epoch_batches for one in every if one.epoch_batches), default=None
        ),
        gpu_source=gpu_source(
            bench.site, every, replayed=asked.step_time_s is not None
        ),
    )
