"""``find_batch_size`` and ``find_num_workers``, for your own program.

They are the probe and the sweep. Functions that another process can import are tried in
fresh processes, and results are exact. Others, such as closures and functions of a
notebook, are tried in this process, and results say so.
"""

import ast
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.base.units import parse_bytes, parse_seconds
from autotune.errors import AutotuneError
from autotune.machine.measured_device import DeviceChoice
from autotune.memory.code_stage import MAX_SIZE, StepProbe, run_probe
from autotune.profiles.profile_paths import profile_paths
from autotune.subjects.bench import CodeBench, open_own
from autotune.subjects.jobs.describe import described_sha256
from autotune.subjects.jobs.load import named_parameters
from autotune.subjects.own.subject import (
    IN_TRIAL,
    SIZE,
    WRAPPED,
    FunctionSubject,
)
from autotune.subjects.subject import Argument
from autotune.trials.session import open_bench
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.code_stage import sweep_on
from trainer.formats.errors import TrainerError

STARTING_BATCH_SIZE = 128
"""Largest size that the decorator tries, as that of accelerate."""
AmountT = TypeVar("AmountT", int, float)
Where = Literal["fresh processes", "this process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueToUse:
    """A value to use, which ``int()`` returns."""

    value: int

    def __int__(self) -> int:
        return self.value

    __index__ = __int__


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize(ValueToUse):
    """Result of ``find_batch_size``: the largest size that fits, less the headroom."""

    feasible_max: int
    """Largest size that ran."""
    infeasible_min: int | None
    """Smallest size that ran out of memory; None if the search reached its upper limit
    first."""
    peak_bytes: int
    trials: int
    """Trials that ran now; 0 if all were in the trial log."""
    verified_in: Where
    """``fresh processes``: exact. ``this process``: what earlier trials left in memory
    counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumWorkers(ValueToUse):
    """Result of ``find_num_workers``: the fewest workers that keep up."""

    settings: Mapping[str, int | bool]
    """Arguments of the loader to use: ``num_workers``, and ``prefetch_factor`` and
    ``pin_memory`` if no number of workers was sufficient and other values are
    faster."""
    undecided_between: tuple[int, ...]
    """Fewest and most workers that may be sufficient; empty if it is decided."""
    keeps_up: bool
    """True if the loader keeps up with the step."""
    ratio_to_cached: float
    """Throughput over that of the same step on cached batches."""
    worker_bytes: int | None
    """Private memory of the largest worker."""
    measured_in: Where


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
) -> Any:
    """Find the largest batch size of a step, or give one to a training function.

    ``find_batch_size(build_step, memory="40GB")`` returns a ``BatchSize``;
    ``build_step(micro_batch_size, device)`` returns a function that takes one optimizer
    step.

    ``@find_batch_size(starting_batch_size=128)`` replaces accelerate's
    ``find_executable_batch_size``: the decorated ``train(batch_size, ...)`` is called
    without its first argument. It is tried in fresh processes, each stopped after three
    optimizer steps, and then called once, with a size that fits. The trial log
    remembers the result.

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
    asked = StepProbe(
        measures_throughput=False,
        subject=FunctionSubject(arguments=dict(arguments or {})),
        reports=Path(reports),
        headroom_share=headroom,
        memory_bytes=(
            _amount(memory, parse_bytes) if isinstance(memory, str) else memory
        ),
        max_size=max_size,
        trial_timeout_s=_seconds(trial_timeout),
    )
    most = replace(asked, max_size=starting_batch_size, starts_at_most=True)
    if function is None:
        return functools.partial(_decorated, most, device)
    if _names(function)[:1] == ["batch_size"]:
        return _decorated(most, device, function)
    return _found(asked, device, function, *_names(function)[:1])


def find_num_workers(
    build_loader: Callable[..., Any],
    *,
    step_time: str | float | None = None,
    build_step: Callable[..., Any] | None = None,
    max_workers: int | None = None,
    device: DeviceChoice = "auto",
    arguments: Mapping[str, Argument] | None = None,
    time_limit: str | float = "5min",
    window: str | float = WINDOW_S,
    reports: str | Path = "reports",
) -> NumWorkers:
    """Find the fewest workers with which a loader of yours keeps up with a step.

    Args:
        build_loader: ``build_loader(num_workers)`` returns an iterable of batches.
        step_time: Duration of a step to replay, in seconds or as ``"120ms"``.
        build_step: Instead, a function that builds the step that consumes the batches;
            it may take a batch.
        max_workers: Most workers to try; None for one per available CPU core.
        device: As for ``find_batch_size``, for ``build_step``.
        arguments: Further arguments of both functions, such as ``micro_batch_size``.
        time_limit: Time budget; several numbers may remain undecided after it.
        window: Duration of one timed window.
        reports: Directory of the trial log.

    Raises:
        ValueError: Unless one of ``step_time`` and ``build_step`` is given.
        AutotuneError: If a function cannot be used, or a window fails.
    """
    if (step_time is None) == (build_step is None):
        raise ValueError(
            "find_num_workers needs step_time, such as '120ms', or build_step"
        )
    functions = {"loader": build_loader} | (
        {} if build_step is None else {"step": build_step}
    )
    names = {role: _importable(function) for role, function in functions.items()}
    here = None in names.values()
    labels = {role: name or _label(functions[role]) for role, name in names.items()}
    code = FunctionSubject(
        step_function=labels.get("step"),
        loader_function=labels["loader"],
        arguments=dict(arguments or {}),
    )
    request = SweepRequest(
        reports=Path(reports),
        replayed_step_s=None if step_time is None else _seconds(step_time),
        budget_s=_seconds(time_limit),
        window_s=_seconds(window),
        max_workers=max_workers,
    )
    choice: DeviceChoice = "cpu" if step_time is not None else device
    with _opened(
        choice, code, request.trial_timeout_s, functions if here else None
    ) as bench:
        found, _ = sweep_on(
            bench, code, {}, request, *profile_paths(None, [code.name], bench.site.name)
        )
    row = next(one for one in found.rows if one.num_workers == found.chosen)
    settings = found.loader_settings
    return NumWorkers(
        value=settings["num_workers"],
        settings=settings,
        undecided_between=tuple(found.undecided_between),
        keeps_up=found.keeps_up,
        ratio_to_cached=row.ratio_to_cached,
        worker_bytes=found.worker_bytes,
        measured_in="this process" if here else "fresh processes",
    )


def _found(
    asked: StepProbe,
    device: DeviceChoice,
    function: Callable[..., Any],
    along: str = SIZE,
    name: str | None = None,
) -> BatchSize:
    """Find the largest size of a function.

    Without ``name``, by which another process imports it, it is tried in this process.
    """
    name = name or _importable(function)
    code = FunctionSubject(
        step_function=name or _label(function),
        arguments=asked.subject.apply({}),
        along=along,
    )
    with _opened(
        device, code, asked.trial_timeout_s, None if name else {"step": function}
    ) as bench:
        probe = replace(asked, subject=code)
        (path,) = profile_paths(None, [code.name], bench.site.name)
        size, found, runner, _ = run_probe(bench, probe, path)
    return BatchSize(
        value=size,
        feasible_max=found.feasible_max,
        infeasible_min=found.infeasible_min,
        peak_bytes=found.feasible_peak_bytes,
        trials=sum(not one.from_trial_log for one in runner.finished),
        verified_in=found.verified_in,
    )


def _decorated(
    asked: StepProbe, device: DeviceChoice, function: Callable[..., Any]
) -> Callable[..., Any]:
    names = _names(function)
    if not names or names[0] in ("self", "cls"):
        what = (
            f"{_path(function)} takes {names[0]} first"
            if names
            else f"{_path(function)} takes no batch_size"
        )
        raise TypeError(f"{what}: make batch_size its first argument")

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        (_, *_), *given = signature.bind_partial(None, *args).arguments.items()
        fixed = {
            name: value
            for name, value in asked.subject.apply({}).items()
            if name not in dict(given)
        }
        options = fixed | kwargs
        # Raises as the call would, before any trial.
        signature.bind(None, *args, **options)
        by_name = dict(given) | options
        plain = all(
            isinstance(value, bool | int | float | str) for value in by_name.values()
        )
        name = _importable(function) if plain else None

        def here(**sizes: Any) -> Any:
            return function(sizes[names[0]], *args, **options)

        code = FunctionSubject(arguments=by_name if name else {})
        tried = function if name else functools.update_wrapper(here, function)
        found = _found(replace(asked, subject=code), device, tried, names[0], name)
        return function(found.value, *args, **options)

    call.__dict__[WRAPPED] = function
    return call


@contextlib.contextmanager
def _opened(
    choice: DeviceChoice,
    code: FunctionSubject,
    timeout_s: float,
    functions: Mapping[str, Callable[..., Any]] | None,
) -> Iterator[CodeBench]:
    """Open a bench of fresh processes, or of this process.

    It is of this process for ``functions`` by role that no other process has.
    """
    if IN_TRIAL in os.environ:
        what = f"the search for {code.words} began while a trial imported its module"
        raise RuntimeError(f"{what}: begin it under 'if __name__ == \"__main__\":'")
    try:
        if functions is None:
            with open_own(choice, code, timeout_s, shared=True) as bench:
                yield bench
            return
        from autotune.api.jobs.in_process import InThisProcess

        server = InThisProcess(
            {code.code()[role]: function for role, function in functions.items()}
        )
        with open_bench(
            choice,
            Path(),
            lambda _: server,
            shared=True,
            loading="nothing: trials run here",
        ) as opened:
            sources = {
                role: described_sha256(function) for role, function in functions.items()
            }
            loader_parameters: frozenset[str] = frozenset()
            if "loader" in functions:
                loader_parameters = named_parameters(functions["loader"])
            yield CodeBench(
                site=opened.site,
                server=opened.server,
                machine=opened.machine,
                display=opened.display,
                load_average_1min=opened.load_average_1min,
                subject=code,
                sources=sources,
                loader_parameters=loader_parameters,
                directory=Path(),
                in_this_process=True,
            )
    except (AutotuneError, TrainerError) as error:
        error.add_note(f"next: {error.next_step}")
        raise


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _importable(function: Callable[..., Any]) -> str | None:
    """Return the name by which another process can import a function.

    Returns:
        The name, or None if it cannot be imported.
    """
    path, module = _path(function), getattr(function, "__module__", None)
    found: Any = sys.modules.get(module or "")
    for part in path.split("."):
        found = getattr(found, part, None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    # A bound method or a partial is another object than its name has; code of exec has
    # no file.
    if (
        getattr(found, WRAPPED, found) != function
        or code is None
        or code.co_filename.startswith("<")
    ):
        return None
    if getattr(function, "__closure__", None) and not hasattr(function, "__wrapped__"):
        return None
    if module != "__main__":
        return f"{module}:{path}"
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return (
        f"{file.resolve()}:{path}"
        if file.suffix == ".py" and not _guarded(file, code.co_firstlineno)
        else None
    )


def _guarded(file: Path, line: int) -> bool:
    """Return whether a line of a script is in ``if __name__ == "__main__":``.

    Another process does not run such a line.
    """
    blocks = [
        one for one in ast.parse(file.read_bytes()).body if isinstance(one, ast.If)
    ]
    return any(
        one.lineno <= line <= (one.end_lineno or 0)
        and "__name__" in ast.unparse(one.test)
        for one in blocks
    )


def _path(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _label(function: Callable[..., Any]) -> str:
    """Return a name for a function that cannot be imported."""
    module = getattr(function, "__module__", "__main__")
    name = _path(function).rpartition(".")[2].strip("<>")
    return f"{module}:{name}"


def _seconds(value: str | float) -> float:
    return _amount(value, parse_seconds) if isinstance(value, str) else float(value)


def _amount(text: str, parse: Callable[[str], AmountT]) -> AmountT:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} {error}") from None
