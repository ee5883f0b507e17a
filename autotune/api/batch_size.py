"""``find_batch_size``: the largest batch size that fits, as a result or a decorator."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from autotune.api.amounts import bytes_of, seconds_of
from autotune.api.functions import (
    importable_name,
    parameter_names,
    qualified_name,
    shown_name,
)
from autotune.api.opened_bench import MeasuredIn, opened_bench
from autotune.api.shown_progress import Progress
from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.machine.measured_device import DeviceChoice
from autotune.memory.probe_request import MAX_SIZE
from autotune.memory.stage import run_probe
from autotune.memory.subject_probe import SubjectProbeRequest
from autotune.profiles.profile_paths import profile_paths
from autotune.subjects.own.subject import SIZE, WRAPPED, FunctionSubject
from autotune.subjects.subject import Argument

STARTING_BATCH_SIZE = 128
"""Largest size that the decorator tries by default, as that of accelerate."""
_DECORATED_SIZE = "batch_size"
"""First argument of a function that is decorated, not a builder of steps."""
P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Result of ``find_batch_size``; ``int()`` returns the size to use."""

    value: int
    """Size to use: the largest that fits, less the headroom."""
    feasible_max: int
    """Largest size that ran."""
    infeasible_min: int | None
    """Smallest size that ran out of memory; None if the search reached its upper limit
    first."""
    peak_bytes: int
    """Peak memory at the largest size that ran."""
    trials: int
    """Trials that ran now; 0 if all were in the trial log."""
    verified_in: MeasuredIn
    """Processes that ran the trials."""

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Limits, device and progress of a search, for any function."""

    limits: SubjectProbeRequest
    """Limits of the probe. Its subject only has the fixed arguments."""
    device: DeviceChoice
    progress: Progress

    @property
    def arguments(self) -> dict[str, Argument]:
        """Fixed arguments of the function."""
        return self.limits.subject.apply({})

    def with_arguments(self, arguments: Mapping[str, Argument]) -> "_Search":
        """Return the search for a function with other fixed arguments."""
        subject = FunctionSubject(arguments=dict(arguments))
        return replace(self, limits=replace(self.limits, subject=subject))


@overload
def find_batch_size(
    function: None = None,
    *,
    starting_batch_size: int = ...,
    memory: str | int | None = ...,
    device: DeviceChoice = ...,
    headroom: float = ...,
    arguments: Mapping[str, Argument] | None = ...,
    max_size: int = ...,
    trial_timeout: str | float = ...,
    reports: str | Path = ...,
    progress: Progress = ...,
) -> Callable[[Callable[Concatenate[int, P], ReturnT]], Callable[P, ReturnT]]: ...


@overload
def find_batch_size(
    function: Callable[..., Any],
    *,
    starting_batch_size: int = ...,
    memory: str | int | None = ...,
    device: DeviceChoice = ...,
    headroom: float = ...,
    arguments: Mapping[str, Argument] | None = ...,
    max_size: int = ...,
    trial_timeout: str | float = ...,
    reports: str | Path = ...,
    progress: Progress = ...,
) -> BatchSize: ...


def find_batch_size(
    function: Callable[..., Any] | None = None,
    *,
    starting_batch_size: int = STARTING_BATCH_SIZE,
    memory: str | int | None = None,
    device: DeviceChoice = "auto",
    headroom: float = HEADROOM_SHARE,
    arguments: Mapping[str, Argument] | None = None,
    max_size: int = MAX_SIZE,
    trial_timeout: str | float = TRIAL_TIMEOUT_S,
    reports: str | Path = "reports",
    progress: Progress = True,
) -> Any:
    """Find the largest batch size of a step, or give one to a training function.

    ``find_batch_size(build_step, memory="40GB")`` returns a ``BatchSize``;
    ``build_step(micro_batch_size, device)`` returns a function that takes one optimizer
    step.

    ``@find_batch_size(starting_batch_size=128)`` replaces accelerate's
    ``find_executable_batch_size``: the decorated ``train(batch_size, ...)`` is called
    without its first argument. It is tried in fresh processes, each stopped after three
    optimizer steps, and then called once, with a size that fits. The trial log
    remembers the result. A function whose first argument is ``batch_size`` may also be
    decorated without parentheses; type checkers only know the form with them.

    Args:
        function: The function; None to decorate one.
        starting_batch_size: Largest size for a decorated function, which is tried
            first.
        memory: Memory budget, such as ``"40GB"`` or a number of bytes; None takes what
            is free.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.
        headroom: Share of the largest size that is left unused.
        arguments: Further arguments of the function.
        max_size: Largest size to try, unless a function is decorated.
        trial_timeout: Longest duration of one trial, in seconds or as ``"10min"``.
        reports: Directory of the trial log.
        progress: True to show progress on standard error, False for none, or a function
            that gets the amount completed, the total amount (None if unknown), and a
            note.

    Raises:
        AutotuneError: If nothing fits, or if the function fails in a trial, whatever it
            raised.
        ValueError: If an argument is out of range.
    """
    if not 0 <= headroom < 1 or min(max_size, starting_batch_size) < 1:
        raise ValueError(
            "headroom must be at least 0 and below 1, max_size and starting_batch_size"
            " at least 1"
        )
    limits = SubjectProbeRequest(
        measures_throughput=False,
        subject=FunctionSubject(arguments=dict(arguments or {})),
        reports=Path(reports),
        headroom_share=headroom,
        memory_bytes=None if memory is None else bytes_of(memory),
        max_size=max_size,
        trial_timeout_s=seconds_of(trial_timeout),
    )
    search = _Search(limits=limits, device=device, progress=progress)
    of_decorated = replace(
        search,
        limits=replace(limits, max_size=starting_batch_size, starts_at_most=True),
    )
    if function is None:
        return functools.partial(_decorated, of_decorated)
    parameters = parameter_names(function)
    if parameters[:1] == [_DECORATED_SIZE]:
        return _decorated(of_decorated, function)
    searched_argument = parameters[0] if parameters else SIZE
    return _largest_size(search, function, searched_argument, importable_name(function))


def _largest_size(
    search: _Search,
    function: Callable[..., Any],
    searched_argument: str,
    name: str | None,
) -> BatchSize:
    """Find the largest size of a function.

    Args:
        search: How to search.
        function: The function.
        searched_argument: Its argument whose largest value is searched.
        name: Name by which another process imports it; None to try it in this one.
    """
    subject = FunctionSubject(
        step_function=name or shown_name(function),
        arguments=search.arguments,
        along=searched_argument,
    )
    request = replace(search.limits, subject=subject)
    with opened_bench(
        search.device,
        subject,
        request.trial_timeout_s,
        {"step": function} if name is None else None,
        search.progress,
    ) as bench:
        (profile_path,) = profile_paths(None, [subject.name], bench.site.name)
        probe = request.prepare(bench)
        size, evidence, runner = run_probe(bench, probe, profile_path)
    return BatchSize(
        value=size,
        feasible_max=evidence.feasible_max,
        infeasible_min=evidence.infeasible_min,
        peak_bytes=evidence.feasible_peak_bytes,
        trials=sum(not trial.from_trial_log for trial in runner.finished),
        verified_in=evidence.verified_in,
    )


def _decorated(search: _Search, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another with the largest size that fits.

    Raises:
        TypeError: If the function does not take the size as its first argument.
    """
    parameters = parameter_names(function)
    if not parameters or parameters[0] in ("self", "cls"):
        takes = f"{parameters[0]} first" if parameters else f"no {_DECORATED_SIZE}"
        raise TypeError(
            f"{qualified_name(function)} takes {takes}: make {_DECORATED_SIZE} its"
            " first argument"
        )
    size_name = parameters[0]
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The size takes the first place in the call.
        positional = dict(signature.bind_partial(None, *args).arguments)
        del positional[size_name]
        fixed = {
            name: value
            for name, value in search.arguments.items()
            if name not in positional
        }
        keywords = fixed | kwargs
        # Raises as the call would, before any trial.
        signature.bind(None, *args, **keywords)
        by_name = positional | keywords
        # Only plain values reach another process.
        is_plain = all(
            isinstance(value, bool | int | float | str) for value in by_name.values()
        )
        name = importable_name(function) if is_plain else None
        tried, arguments = function, by_name
        if name is None:

            def with_arguments(**sizes: Any) -> Any:
                return function(sizes[size_name], *args, **keywords)

            tried = functools.update_wrapper(with_arguments, function)
            arguments = {}
        largest = _largest_size(
            search.with_arguments(arguments), tried, size_name, name
        )
        return function(largest.value, *args, **keywords)

    call.__dict__[WRAPPED] = function
    return call
