"""Subject of a probe: a training step at a known site, with its limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.base.wording import plural
from autotune.evidence.peak_contents import ContentsAt
from autotune.memory.decide.overheads import OverheadsRange
from autotune.memory.estimate import AnyTraceRequest, MemoryEstimate, estimate_model
from autotune.memory.values import KernelsRequest, StepRequest
from autotune.subjects.subject import Argument, Subject
from autotune.trials.trial_machine import Machine
from autotune.trials.values import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Numbers of optimizer steps of a trial: first untimed ones, then timed ones."""

    warmup: int
    timed: int


FIT_STEPS_OF_CODE = StepCounts(warmup=1, timed=2)
"""Steps of a trial of your code: the first allocates the optimizer's state, two further
ones must agree."""
KERNEL_STEPS = {
    "cpu": StepCounts(warmup=1, timed=1),
    "cuda": StepCounts(warmup=3, timed=3),
}
"""Steps of a trial that profiles kernels, by device."""


def step_fields(
    subject: Subject,
    choice: Mapping[str, Argument],
    steps: StepCounts,
    *,
    device: Literal["cpu", "cuda"],
    local_ranks: int,
    source_sha256: str = "",
) -> dict[str, Any]:
    """Return the fields of a ``StepRequest`` that follow from a subject.

    Args:
        subject: The subject, which must have a step.
        choice: Its settings, the size among them.
        steps: Optimizer steps to take.
        device: Device of the steps.
        local_ranks: Ranks of this node, which take the steps together.
        source_sha256: Hash of the subject's source; empty if it is this project's.
    """
    call = subject.step(choice)
    assert call is not None, f"{subject.words} has no step"
    return {
        "function": call.function,
        "arguments": dict(call.arguments),
        "size": int(choice[subject.size.name]),
        "units_per_size": subject.size.units_per_size,
        "source_sha256": source_sha256,
        "device": device,
        "warmup_steps": steps.warmup,
        "timed_steps": steps.timed,
        "local_ranks": local_ranks,
    }


def _nothing_loaded(_modules: Sequence[str]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeProbe:
    """A subject at a known site, whose largest size is searched."""

    subject: Subject
    device: Literal["cpu", "cuda"]
    memory_budget_bytes: int
    """Memory that each rank may use."""
    max_size: int
    """Largest size to try."""
    fit_steps: StepCounts
    """Steps of a trial that tests whether a size fits."""
    fit_choice: Mapping[str, Argument] = field(default_factory=dict)
    """Settings of such a trial, besides the size."""
    timed_choice: Mapping[str, Argument] = field(default_factory=dict)
    """Settings of a trial that measures throughput, besides the size."""
    multiple_of: int = 1
    """Sizes are multiples of it."""
    headroom_share: float = HEADROOM_SHARE
    """Share of the largest size to leave free."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    """Time limit of one trial, in seconds."""
    local_ranks: int = 1
    """Ranks of this node, which take the steps together."""
    micro_batches: int = 1
    """Micro-batches of a step on each rank in the search, for the evidence."""
    device_used_before_bytes: list[int] | None = None
    """Memory in use on the GPU of each local rank before this program, by NVML; None if
    it is unknown, and on a CPU."""
    global_batch_size: int | None = None
    """Size of the global batch of an optimizer step over all ranks; None if it follows
    from the chosen size."""
    tokens_per_size: float | None = None
    """Non-padding tokens that one more of the size adds on average; None if the subject
    has no tokens."""
    trace: AnyTraceRequest | None = None
    """Request for traces that predict memory; None if the subject cannot be traced."""
    overheads: OverheadsRange | None = None
    """Overheads of a traced step on this device; None if nothing is traced."""
    document_tokens: float | None = None
    """Tokens of a document on average; None if they are unknown."""
    allow_varying: bool = False
    """True to accept steps of one size that differ in memory."""
    starts_at_most: bool = False
    """True if ``max_size`` is tried first, because it is likely to fit."""
    measures_throughput: bool = True
    """False to search for the largest size alone."""
    contents: ContentsAt = "none"
    """Sizes at which the contents of memory are recorded."""
    study_name: str = "probe"
    """Name of the Optuna study."""
    study_file: Path | None = None
    """File of the Optuna study; None keeps it in memory."""
    source_sha256: str = ""
    """Hash of the subject's source; empty if it is this project's."""
    directory: str | None = None
    """Directory from which the subject's modules are imported; None if it is this
    project's."""
    in_this_process: bool = False
    """True if trials run one after the other in this process, as closures do."""
    load_modules: Callable[[Sequence[str]], bool] = _nothing_loaded
    """Imports modules in front of all trials, so that they do not count as a step's
    memory; returns False if that is not possible."""

    @property
    def on_gpu(self) -> bool:
        """True on a GPU, whose caching allocator rounds peaks up."""
        return self.device == "cuda"

    def words(self, size: int) -> str:
        """Return a size with its unit, in words."""
        if self.subject.size.noun is not None:
            return plural(size, self.subject.size.noun)
        return f"{self.subject.size.name}={size}"

    def estimate(self, machine: Machine) -> MemoryEstimate:
        """Trace the step, and predict its memory near the largest size.

        The probe must have a trace and overheads.

        Raises:
            CannotTrace: If the memory can only be measured.
            BadInput: If the settings are invalid.
        """
        assert self.trace is not None, "a probe without a trace is not predicted"
        assert self.overheads is not None, "a trace has overheads"
        return estimate_model(
            self.trace,
            machine,
            self.memory_budget_bytes,
            self.overheads.usual,
            max_micro_batch_size=self.max_size,
        )

    def step_trial(
        self,
        size: int,
        steps: StepCounts,
        budget_bytes: int | None,
        *,
        attempt: int = 0,
        timed: bool = False,
        attribute: bool = False,
    ) -> Trial:
        """Return a trial of a size.

        Args:
            size: Size to try.
            steps: Optimizer steps to take.
            budget_bytes: Memory that each rank may use; None without a limit.
            attempt: Number that makes a repeated trial another trial; 0 for the first.
            timed: True for a trial that measures throughput.
            attribute: True for a trial that records the contents of memory.
        """
        request = StepRequest(
            **self._step_fields(size, steps, timed=timed),
            memory_budget_bytes=budget_bytes,
            attempt=attempt,
            attribute=attribute,
        )
        return request.trial(**self._local(), first_attempt=attempt == 0)

    def kernels_trial(self, size: int) -> Trial:
        """Return a trial that profiles the kernels of a step of one micro-batch."""
        request = KernelsRequest(
            **self._step_fields(size, KERNEL_STEPS[self.device], timed=True),
            memory_budget_bytes=None,
            document_tokens=self.document_tokens,
        )
        return request.trial(**self._local())

    def _step_fields(
        self, size: int, steps: StepCounts, *, timed: bool
    ) -> dict[str, Any]:
        choice = self.timed_choice if timed else self.fit_choice
        return step_fields(
            self.subject,
            {**choice, self.subject.size.name: size},
            steps,
            device=self.device,
            local_ranks=self.local_ranks,
            source_sha256=self.source_sha256,
        )

    def _local(self) -> dict[str, Any]:
        """Return the inputs of a trial that depend on this machine."""
        return {
            "timeout_s": self.trial_timeout_s,
            "limit_s": self.trial_timeout_s,
            "directory": self.directory,
            "device_used_before_bytes": self.device_used_before_bytes,
        }
