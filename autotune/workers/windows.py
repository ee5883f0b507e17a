"""Timed windows of a subject's training, as trials.

The sweep of DataLoader workers, the search for faster settings and the comparison with
baselines measure the same windows, with other settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from autotune.machine.measured_device import local_ranks
from autotune.subjects.bench import SubjectBench
from autotune.subjects.subject import Argument, Call, Subject
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.values import Trial
from autotune.workers.decide.loader_limits import LoaderLimits
from autotune.workers.decide.window_time import MIN_STEPS
from autotune.workers.values import CallTable, WindowRequest

TORCH_DEFAULTS: Mapping[str, int | bool] = {"prefetch_factor": 2, "pin_memory": False}
"""Settings of a torch DataLoader to which none are passed."""
SubjectT = TypeVar("SubjectT", bound=Subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of a DataLoader; a setting that is None stays as the subject has it."""

    num_workers: int
    """DataLoader workers of each rank."""
    prefetch_factor: int | None = None
    """Batches that each of these workers loads ahead."""
    pin_memory: bool | None = None
    """True to pin memory for copies to the GPU."""

    @property
    def arguments(self) -> dict[str, int | bool]:
        """The settings as arguments of a function that builds a loader."""
        settings = {
            "num_workers": self.num_workers,
            # torch rejects a prefetch factor without workers.
            "prefetch_factor": self.prefetch_factor if self.num_workers else None,
            "pin_memory": self.pin_memory,
        }
        return {name: value for name, value in settings.items() if value is not None}


def settings_words(settings: Mapping[str, int | bool]) -> str:
    """Return loader settings as arguments: ``num_workers=2, prefetch_factor=4``."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectWindows(Generic[SubjectT]):
    """Windows to measure of a subject on a known machine."""

    subject: SubjectT
    """The subject whose step trains, or whose loader is measured."""
    choice: Mapping[str, Argument] = field(default_factory=dict)
    """Choice of its settings, with the size."""
    request: SweepRequest
    """Length of the windows, and their time budget."""
    device: Literal["cpu", "cuda"]
    """Device of the step."""
    limits: LoaderLimits
    """Limits of the DataLoader workers of a rank. ``batch_bytes`` is 0 if batches are
    not known before they are measured."""
    varied: frozenset[str] = frozenset()
    """Settings of the loader besides ``num_workers`` that may be varied."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of the functions that depend on this machine, and do not make
    another trial."""
    local: Mapping[str, Any] = field(default_factory=dict)
    """Other inputs that depend on this machine, as ``Trial.local``."""
    source_sha256: str = ""
    """Hash of the source of your functions; empty for those of installed packages."""
    storage: str = ""
    """Name of the storage that holds the data. A trial log is reused only if its
    windows read from the same storage."""

    fed_by: Literal["loader", "step", "training"] = "loader"
    """Source of the batches: the subject's loader; the step itself, as in a probe; or
    its training loop, with its own loader."""

    @property
    def local_ranks(self) -> int:
        """Ranks of this node, which train together."""
        return self.limits.local_ranks

    @property
    def searched(self) -> frozenset[str]:
        """Settings that a joint search varies besides the number of workers.

        Pinned memory is only useful with a GPU.
        """
        if self.device == "cuda" and self.request.replayed_step_s is None:
            return self.varied
        return self.varied - {"pin_memory"}

    @property
    def loader(self) -> Call:
        """The call that builds the subject's loader."""
        call = self.subject.loader(self.choice)
        # A subject without a loader has no windows, unless its step has its own data.
        assert call is not None
        return call

    @property
    def step(self) -> Call | None:
        """The call that builds the step; None if a step is replayed."""
        if self.request.replayed_step_s is not None:
            return None
        if self.fed_by == "training":
            return self.subject.training(self.choice)
        if self.fed_by == "step":
            return self.subject.step(self.choice)
        return self.subject.window_step(self.choice)


def window_trial(
    windows: SubjectWindows[Any],
    round_number: int,
    interleaved_with: Sequence[str],
    *,
    settings: LoaderSettings | None = None,
    cached: bool = False,
    losses: bool = False,
    min_steps: int = MIN_STEPS,
    window_s: float | None = None,
) -> Trial:
    """Return the trial of a window.

    Args:
        windows: Windows of which this is one.
        round_number: Number of the window's round, from 0.
        interleaved_with: Names of all windows of the round.
        settings: Settings of the loader; None takes those of the choice.
        cached: True to train on cached batches, without data loading.
        losses: True to keep the loss of each step, if the subject's step can.
        min_steps: Fewest optimizer steps of the window.
        window_s: Least duration of the window; None takes that of the request.
    """
    request = windows.request
    step = None if windows.step is None else CallTable.of_call(windows.step)
    if step is not None and losses:
        step = CallTable(
            function=step.function, arguments=step.arguments | {"losses": True}
        )
    window = WindowRequest(
        step=step,
        loader=_loader_table(windows, settings, cached=cached),
        unit=windows.subject.size.unit,
        device=windows.device,
        cached=cached,
        round=round_number,
        interleaved_with=list(interleaved_with),
        window_s=request.window_s if window_s is None else window_s,
        min_steps=min_steps,
        local_ranks=windows.limits.local_ranks,
        replayed_step_s=request.replayed_step_s,
        source_sha256=windows.source_sha256,
        storage=windows.storage,
        units_per_micro_batch=units_per_micro_batch(windows),
        queued_batches=queued_batches(windows),
    )
    return window.trial(
        timeout_s=request.trial_timeout_s, inputs=dict(windows.inputs), **windows.local
    )


def _loader_table(
    windows: SubjectWindows[Any], settings: LoaderSettings | None, *, cached: bool
) -> CallTable | None:
    """Return the call of the loader of a window; None if the step has its own data."""
    if windows.fed_by != "loader":
        return None
    loader = CallTable.of_call(windows.loader)
    arguments = dict(loader.arguments)
    if cached:
        # Loading cached batches is not timed.
        settings = replace(settings or LoaderSettings(num_workers=0), num_workers=0)
    if settings is not None:
        arguments |= settings.arguments
    sample_delay_s = windows.request.sample_delay_s
    if sample_delay_s and not cached:
        arguments["sample_delay_s"] = sample_delay_s
    return CallTable(function=loader.function, arguments=arguments)


def queued_batches(windows: SubjectWindows[Any]) -> int:
    """Return the batches that the loader of a training loop may hold ready."""
    if windows.fed_by != "training":
        return 0
    prefetch_factor = windows.choice.get("prefetch_factor")
    ready = prefetch_factor or TORCH_DEFAULTS["prefetch_factor"]
    return int(windows.choice.get("num_workers") or 0) * int(ready)


def units_per_micro_batch(windows: SubjectWindows[Any]) -> float:
    """Return the units of a micro-batch of a step that has its own data, else 1."""
    size = windows.subject.size
    chosen = windows.choice.get(size.name)
    if windows.fed_by == "loader" or not isinstance(chosen, int):
        return 1.0
    return float(chosen * size.units_per_size)


def windows_of_subject(
    subject: Subject,
    choice: Mapping[str, Argument],
    request: SweepRequest,
    bench: SubjectBench,
    *,
    fed_by: Literal["loader", "step", "training"] = "loader",
) -> SubjectWindows[Subject]:
    """Return windows of a subject on this machine, with limits of workers.

    Args:
        subject: The subject.
        choice: Its settings, with the size at which to measure.
        request: Length of the windows, and their time budget.
        bench: Machine on which trials of the subject run.
        fed_by: As for ``SubjectWindows``.

    Raises:
        BadInput: If more ranks are requested than there are GPUs.
    """
    ranks = request.local_ranks or 1
    if request.replayed_step_s is None:
        ranks = local_ranks(bench.site, ranks)
    loader = subject.loader(choice)
    prefetch_factor = TORCH_DEFAULTS["prefetch_factor"]
    if loader is not None:
        prefetch_factor = loader.arguments.get("prefetch_factor", prefetch_factor)
    limits = LoaderLimits(
        host=bench.site.host,
        local_ranks=ranks,
        # The batches are not known before they are measured.
        batch_bytes=0,
        prefetch_factor=int(prefetch_factor),
        requested_workers=request.max_workers,
    )
    return SubjectWindows(
        subject=subject,
        choice=choice,
        request=request,
        device=bench.site.device,
        limits=limits,
        varied=frozenset(TORCH_DEFAULTS) & bench.loader_parameters,
        local=bench.local_inputs(request.trial_timeout_s),
        fed_by=fed_by,
        source_sha256=bench.source_sha256("loader", "step"),
    )
