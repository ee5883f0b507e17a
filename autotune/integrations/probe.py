"""Probe of your own step: the largest size under a memory budget.

The size is verified on both sides in fresh processes.
"""

import functools
import statistics
from dataclasses import dataclass, field

from autotune.base.units import format_bytes
from autotune.errors import BadInput, ExceedsMemory, Undecided
from autotune.integrations.values import (
    STEPS,
    OwnStepFigures,
    OwnStepRequest,
    OwnTraceRequest,
    SizeRow,
    StepEvidence,
    StepProbe,
)
from autotune.memory.decide.batch_search import Prediction, bracket, predict_bytes
from autotune.memory.decide.memory_model import peak_bytes
from autotune.memory.decide.overheads import overheads_on_cpu, overheads_on_gpu
from autotune.memory.decide.step_doubts import (
    LONG_STEPS,
    Doubt,
    doubt_of,
    first_prediction,
    ignores_size,
    misses_steps,
    next_prediction,
)
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.size_search import CLOSE_BYTES, SizeSearch
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.subjects.bench import OwnBench
from autotune.subjects.decide import crash_words, error_line
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Crashed, Measured, Outcome, OutOfMemory, TimedOut
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial

WIDER = 4
"""Factor on the budget of a trial that shows how much too small it is."""
CPU_CLOSE_BYTES = 2**17
"""Difference between processes on a CPU whose heap was full at first."""
FIRST_SIZE = 4
"""First size: large enough for batch normalisation, and for a first look at how memory
grows."""


@dataclass(slots=True, kw_only=True)
class OwnSearch(SizeSearch):
    """State of a running probe. Sizes are counted in units of ``multiple_of``."""

    probe: StepProbe
    bench: OwnBench
    memory_budget_bytes: int
    figures: dict[int, OwnStepFigures] = field(default_factory=dict)
    """Figures of each size that fitted, the last of several trials."""
    varies_bytes: int = 0
    estimate: MemoryEstimate | None = None
    not_traced: str | None = None
    _loads: int = 0
    """Number of times that late imports were moved in front of trials, which makes them
    other trials."""
    _last_failure: tuple[int, str] = (0, "")

    def __post_init__(self) -> None:
        self.name, self.on_gpu = self.probe.code.words, self.bench.site.device == "cuda"
        self.budget_bytes = self.memory_budget_bytes
        self.max_size = max(1, self.probe.max_size // self.probe.multiple_of)

    def words(self, size: int) -> str:
        """Return a size with the name of its argument."""
        return f"{self.probe.code.along}={size * self.probe.multiple_of}"

    def peak_bytes_of(self, size: int, outcome: Measured) -> int:
        """Return the peak of a trial.

        Raises:
            BadInput: If the trial shows that the step cannot be probed.
        """
        figures = self.figures[size] = OwnStepFigures.of(outcome)
        if not self.bench.in_this_process and (doubt := doubt_of(figures)) is not None:
            self._confirm(size, *doubt)
        fitted = {
            one.micro_batch_size: one.peak_bytes or 0 for one in self.tried if one.fits
        }
        fitted_bytes = fitted | {size: figures.peak_bytes}
        fits = sorted(fitted_bytes.items())
        if self.estimate is None:
            before = self.prediction
            self.prediction = (
                first_prediction(size, figures)
                if before is None
                else next_prediction(fits, before)
            )
        same = ignores_size(fits, exact=not self.bench.in_this_process)
        if same is not None:
            raise BadInput(
                f"{self.name} seems to ignore {self.probe.code.along}:"
                f" {format_bytes(fitted_bytes[same[1]])} at {self.words(same[1])} as at"
                f" {self.words(same[0])}",
                next_step=(
                    f"Make the batch as large as {self.probe.code.along} says; is the"
                    " dataset smaller?"
                ),
            )
        if misses_steps(figures) and not misses_steps(self.figures[min(self.figures)]):
            raise BadInput(
                f"{self.name} took {figures.optimizer_steps} optimizer steps in"
                f" {len(figures.step_s)} calls at {self.words(size)}, and one in each"
                f" at {self.words(min(self.figures))}",
                next_step=(
                    "If it catches OutOfMemoryError to skip a batch, let it raise in"
                    " trials."
                ),
            )
        return figures.peak_bytes

    def reject_failure(self, size: int, outcome: Outcome) -> None:
        """Raise an error for a failure of your code.

        A crash is an error only if it happens twice in the same way.
        """
        at, detail = (
            self.words(size),
            "" if isinstance(outcome, Measured) else outcome.detail,
        )
        if isinstance(outcome, TimedOut):
            told = f"{self.name} did not end within its time limit at {at}: {detail}"
            raise Undecided(
                told,
                next_step=(
                    "Allow more time with --trial-timeout; or mend the hang at that"
                    " place."
                ),
            )
        if isinstance(outcome, Crashed):
            last = (size, error_line(detail))
            if self._last_failure == last:
                next_step = (
                    f"Call it yourself with {at}, three times if it returns a step."
                )
                if "NameError" in last[1] and not self.bench.in_this_process:
                    next_step += (
                        " Trials import its module, without what is under 'if __name__"
                        ' == "__main__":\'.'
                    )
                raise BadInput(
                    f"{self.name} {crash_words(detail, f' at {at}')}",
                    next_step=next_step,
                )
            self._last_failure = last

    def predict(self) -> None:
        """Predict memory from a trace.

        This requires that the module has ``build_model`` and that it can be traced.
        """
        bench, code = self.bench, self.probe.code
        if bench.model is None:
            return
        asked = OwnTraceRequest(
            model=bench.model,
            arguments=dict(code.arguments),
            along=code.along,
            device=bench.site.device,
            directory=str(bench.directory.resolve()),
        )
        gpu = bench.site.gpu
        overheads = (
            overheads_on_gpu(gpu.compute_capability, 1, bench.site.cuda_bytes)
            if gpu
            else overheads_on_cpu()
        )
        self.runner.on_trial(f"{self.name}: predicting memory from a trace", None)
        try:
            self.estimate = estimate_model(
                asked,
                bench.machine,
                self.budget_bytes,
                overheads.usual,
                max_micro_batch_size=self.probe.max_size,
            )
        except (CannotTrace, BadInput) as error:
            self.not_traced = error.message
            return
        fit, usual = self.estimate.memory_model, overheads.usual
        self.prediction = Prediction(
            peak_bytes=functools.cache(lambda rows: float(peak_bytes(fit, rows, usual)))
        )

    def first(self) -> None:
        """Try the first size, or the largest and then the first."""
        if not self.tried and self.probe.starts_at_most:
            self.try_size(self.max_size)
        if bracket(self.tried).feasible_max:
            return
        size = min(FIRST_SIZE, self.max_size)
        self.try_size(size)
        figures = self.figures.get(size)
        if self.tried[-1].fits is False and not self.on_gpu:
            outcome = self.look(size)
            figures = (
                OwnStepFigures.of(outcome) if isinstance(outcome, Measured) else None
            )
        server = self.bench.server
        late = (
            figures.imported
            if figures is not None and self.bench.forked and not self.on_gpu
            else ()
        )
        # Or they would count as the step's memory.
        if late and isinstance(server, ForkServerMachine) and server.load(late):
            self.tried, self._loads = [], self._loads + 1
            self.prediction = None if self.estimate is None else self.prediction
            self.figures.clear()
            self.try_size(size)

    def look(self, size: int) -> Outcome:
        """Run a size with a wider limit.

        On a GPU there is none. On a CPU it is a multiple of the budget, as others use
        the host.
        """
        trial = self.trial_of(size, limit_bytes=self._wider_bytes)
        return self.runner.run(trial, f"{self.name}: {self.words(size)}, wider limit")

    @property
    def _wider_bytes(self) -> int | None:
        wide = WIDER * self.memory_budget_bytes
        return (
            None
            if self.on_gpu
            else min(wide, self.bench.site.host.ram_available_bytes // 2)
        )

    def trial_of(
        self,
        size: int,
        attempt: int = 0,
        *,
        steps: int = STEPS,
        limit_bytes: int | None = 0,
    ) -> Trial:
        """Return a trial under a limit: None for no limit, 0 for the budget."""
        code, bench = self.probe.code, self.bench
        assert code.step is not None and bench.subject.step_sha256 is not None
        asked = OwnStepRequest(
            step=code.step,
            source_sha256=bench.subject.step_sha256,
            device=bench.site.device,
            steps=steps,
            arguments={**code.arguments, code.along: size * self.probe.multiple_of},
            attempt=attempt + self._loads,
            memory_budget_bytes=(
                self.memory_budget_bytes if limit_bytes == 0 else limit_bytes
            ),
        )
        return bench.trial(asked, self.probe.trial_timeout_s, first_attempt=not attempt)

    def _confirm(self, size: int, doubt: Doubt, bytes_: int) -> None:
        """Take more steps of a doubtful size.

        Raises:
            BadInput: If the doubt remains.
        """
        if self.probe.allow_varying:
            self.varies_bytes = max(self.varies_bytes, bytes_)
            return
        label = f"{self.name}: {self.words(size)}, {LONG_STEPS} steps"
        outcome = self.runner.run(
            self.trial_of(size, steps=LONG_STEPS, limit_bytes=self._wider_bytes), label
        )
        found: tuple[Doubt, int] | None = (doubt, bytes_)
        if not isinstance(outcome, OutOfMemory):
            found = doubt_of(
                OwnStepFigures.of(
                    self.runner.require_measured(f"the trial {label!r}", outcome)
                )
            )
        if found is None:
            return
        amount, at = format_bytes(found[1]), self.words(size)
        what = f"changes its memory between steps: {amount} of difference at {at}"
        what += ", so a size that fits once may not fit later"
        next_step = (
            "Use the largest batch that can occur, such as the longest sequences; or"
            " add --allow-varying."
        )
        if found[0] == "leaks":
            what = (
                f"leaks memory: {amount} more after each step at {at}, so no size fits"
                " for long"
            )
            next_step = (
                "Find what your step keeps, such as losses with their graph: use"
                " loss.detach()."
            )
        raise BadInput(f"{self.name} {what}", next_step=next_step)


def probe_step(
    probe: StepProbe, bench: OwnBench, memory_budget_bytes: int, runner: TrialRunner
) -> StepEvidence:
    """Find and verify the largest size in fresh processes.

    Raises:
        ExceedsMemory: If not even the smallest size fits.
        BadInput: If the step cannot be probed.
        Undecided: If trials failed for another reason.
    """
    here = bench.in_this_process
    search = OwnSearch(
        probe=probe,
        bench=bench,
        memory_budget_bytes=memory_budget_bytes,
        runner=runner,
        verified_twice=here,
        close_bytes=CLOSE_BYTES if bench.site.device == "cuda" else CPU_CLOSE_BYTES,
    )
    search.predict()
    search.first()
    search.find()
    found = bracket(search.tried)
    if not (largest := found.feasible_max):
        raise _does_not_fit(search)
    unit, figures = probe.multiple_of, search.figures[largest]
    peaks = [
        one.peak_bytes or 0
        for one in search.tried
        if one.micro_batch_size == largest and one.fits
    ]
    limit = with_headroom(largest, probe.headroom_share) * unit
    return StepEvidence(
        feasible_max=largest * unit,
        infeasible_min=(
            None if found.infeasible_min is None else found.infeasible_min * unit
        ),
        feasible_peak_bytes=max(peaks),
        predicted_peak_bytes=predict_bytes(search.tried, largest, search.prediction),
        traced_max=(
            None if search.estimate is None else search.estimate.max_micro_batch_size
        ),
        not_traced=search.not_traced,
        kept_bytes=figures.kept_bytes[-1],
        **{
            name: getattr(figures, name)
            for name in ("host_peak_bytes", "optimizer_steps", "trains")
        },
        multiple_of=unit,
        varies_bytes=search.varies_bytes,
        verified_in="this process" if here else "fresh processes",
        rows=_rows(search),
        seconds=round(runner.seconds, 3),
        choice=f"the largest that fits, {largest * unit}"
        + (
            f", less a headroom of {probe.headroom_share:.0%}"
            if limit < largest * unit
            else ""
        ),
    )


def _rows(search: OwnSearch) -> list[SizeRow]:
    """Return the trials that decided, in their order."""
    rows = []
    for one in search.tried:
        if one.fits is not None:
            figures = search.figures[one.micro_batch_size] if one.fits else None
            step_s = (
                None
                if figures is None or search.runner.pretended
                else statistics.median(figures.step_s[1:])
            )
            size = one.micro_batch_size * search.probe.multiple_of
            rows.append(
                SizeRow(
                    size=size,
                    fits=one.fits,
                    peak_bytes=one.peak_bytes,
                    step_s=step_s or None,
                )
            )
    return rows


def _does_not_fit(search: OwnSearch) -> ExceedsMemory:
    """Return the error for a step of which not even the smallest size fits.

    It names the memory that the step needs.
    """
    outcome = search.look(1)
    if isinstance(outcome, Measured):
        need = f"; it needs {format_bytes(OwnStepFigures.of(outcome).peak_bytes)}"
    else:
        need = f", and fails with a wider limit: {outcome.detail.strip()[-300:]}"
    budget = format_bytes(search.memory_budget_bytes)
    what = (
        f"{search.name} exceeds the memory budget of {budget} at"
        f" {search.words(1)}{need}"
    )
    next_step = (
        "Raise --memory; or build a smaller model, shorter sequences, or activation"
        " checkpointing."
    )
    return ExceedsMemory(what, next_step=next_step)
