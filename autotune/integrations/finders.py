"""``find_batch_size`` and ``find_num_workers``: the probe and the sweep from inside your own program.

Functions that another process can import are tried in fresh processes, and results are exact. Others, such as closures
and functions of a notebook, are tried in this process, and results say so.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S, WINDOW_S
from autotune.base.units import parse_bytes, parse_seconds
from autotune.errors import AutotuneError
from autotune.integrations.bench import OwnBench, open_own
from autotune.integrations.stage import run_probe, sweep_on
from autotune.integrations.values import (
    IN_TRIAL,
    MAX_SIZE,
    SIZE,
    WRAPPED,
    Argument,
    LoaderSweep,
    OwnCode,
    StepProbe,
    Subject,
)
from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.decide.batch_split import with_headroom
from autotune.profiles.store import profile_paths
from autotune.trials.session import open_bench
from trainer.errors import TrainerError

STARTING_BATCH_SIZE = 128
"""Largest size that the decorator tries, as that of accelerate."""
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
    """Smallest size that ran out of memory; None if the search reached its upper limit first."""
    peak_bytes: int
    trials: int
    """Trials that ran now; 0 if all were in the trial log."""
    verified_in: Where
    """``fresh processes``: exact. ``this process``: what earlier trials left in memory counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumWorkers(ValueToUse):
    """Result of ``find_num_workers``: the fewest workers that keep up."""

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
    function: Callable[..., Any] | None = None, *, starting_batch_size: int = STARTING_BATCH_SIZE,
    memory: str | int | None = None, device: DeviceChoice = "auto", headroom: float = HEADROOM_SHARE,
    arguments: Mapping[str, Argument] | None = None, max_size: int = MAX_SIZE,
    trial_timeout: str | float = TRIAL_TIMEOUT_S, reports: str | Path = "reports",
) -> Any:  # noqa: ANN401 - a size, or a decorated function  # fmt: skip
    """Find the largest batch size of a step of yours, or decorate a training function so that it gets one.

    ``find_batch_size(build_step, memory="40GB")`` returns a ``BatchSize``; ``build_step(micro_batch_size, device)``
    returns a function that takes one optimizer step.

    ``@find_batch_size(starting_batch_size=128)`` replaces accelerate's ``find_executable_batch_size``: the decorated
    ``train(batch_size, ...)`` is called without its first argument. It is tried in fresh processes, each stopped
    after three optimizer steps, and then called once, with a size that fits. The trial log remembers the result.

    Args:
        function: The function; None to decorate one.
        starting_batch_size: Largest size for a decorated function, which is tried first.
        memory: Memory budget, such as ``"40GB"`` or a number of bytes; None takes what is free.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.
        headroom: Share of the largest size that is left unused.
        arguments: Further arguments of the function.
        max_size: Largest size to try, unless a function is decorated.
        trial_timeout: Longest duration of one trial, in seconds or as ``"10min"``.
        reports: Directory of the trial log.

    Raise ``AutotuneError`` if nothing fits, or the function cannot be tried.
    """
    asked = StepProbe(
        code=OwnCode(arguments=dict(arguments or {})), reports=Path(reports), headroom_share=headroom,
        memory_bytes=parse_bytes(memory) if isinstance(memory, str) else memory, max_size=max_size,
        trial_timeout_s=_seconds(trial_timeout),
    )  # fmt: skip
    most = replace(asked, max_size=starting_batch_size, starts_at_most=True)
    if function is None:
        return functools.partial(_decorated, most, device)
    if _names(function)[:1] == ["batch_size"]:
        return _decorated(most, device, function)
    return _found(asked, device, function, *_names(function)[:1])


def find_num_workers(
    build_loader: Callable[..., Any], *, step_time: str | float | None = None,
    build_step: Callable[..., Any] | None = None, max_workers: int | None = None, device: DeviceChoice = "auto",
    arguments: Mapping[str, Argument] | None = None, time_limit: str | float = "5min",
    window: str | float = WINDOW_S, reports: str | Path = "reports",
) -> NumWorkers:  # fmt: skip
    """Find the fewest workers with which a loader of yours keeps up with a step.

    Args:
        build_loader: ``build_loader(num_workers)`` returns an iterable of batches.
        step_time: Duration of a step to replay, in seconds or as ``"120ms"``.
        build_step: Instead, a function that builds the step that consumes the batches; it may take a batch.
        max_workers: Most workers to try; None for one per available CPU core.
        device: As for ``find_batch_size``, for ``build_step``.
        arguments: Further arguments of both functions, such as ``micro_batch_size``.
        time_limit: Time budget; several numbers may remain undecided after it.
        window: Duration of one timed window.
        reports: Directory of the trial log.

    Raise ``ValueError`` unless one of ``step_time`` and ``build_step`` is given, ``AutotuneError`` if a function cannot
    be used, or a window fails.
    """
    if (step_time is None) == (build_step is None):
        raise ValueError("find_num_workers needs step_time, such as '120ms', or build_step")
    functions = {"loader": build_loader} | ({} if build_step is None else {"step": build_step})
    names = {role: _importable(function) for role, function in functions.items()}
    here = None in names.values()
    labels = {role: name or _label(functions[role]) for role, name in names.items()}
    code = OwnCode(step=labels.get("step"), loader=labels["loader"], arguments=dict(arguments or {}))
    sweep = LoaderSweep(
        code=code, reports=Path(reports), step_time_s=None if step_time is None else _seconds(step_time),
        budget_s=_seconds(time_limit), window_s=_seconds(window), max_workers=max_workers,
    )  # fmt: skip
    choice: DeviceChoice = "cpu" if step_time is not None else device
    with _opened(choice, code, sweep.trial_timeout_s, functions if here else None) as bench:
        found, _ = sweep_on(bench, sweep, *profile_paths(None, [code.name], bench.site.name))
    row = next(one for one in found.rows if one.num_workers == found.chosen)
    return NumWorkers(
        value=found.chosen, undecided_between=tuple(found.undecided_between), keeps_up=found.keeps_up,
        ratio_to_cached=row.ratio_to_cached, worker_bytes=found.worker_bytes,
        measured_in="this process" if here else "fresh processes",
    )  # fmt: skip


def _found(
    asked: StepProbe, device: DeviceChoice, function: Callable[..., Any], along: str = SIZE, name: str | None = None
) -> BatchSize:
    """Find the largest size of a function; without the ``name`` of an importable one, in this process."""
    name = name or _importable(function)
    code = asked.code.model_copy(update={"step": name or _label(function), "along": along})
    with _opened(device, code, asked.trial_timeout_s, None if name else {"step": function}) as bench:
        probe = replace(asked, code=code)
        found, runner, _ = run_probe(bench, probe, *profile_paths(None, [code.name], bench.site.name))
    return BatchSize(
        value=with_headroom(found.feasible_max, asked.headroom_share), feasible_max=found.feasible_max,
        infeasible_min=found.infeasible_min, peak_bytes=found.feasible_peak_bytes,
        trials=sum(not one.from_trial_log for one in runner.finished), verified_in=found.verified_in,
    )  # fmt: skip


def _decorated(asked: StepProbe, device: DeviceChoice, function: Callable[..., Any]) -> Callable[..., Any]:
    names = _names(function)
    if not names:
        raise TypeError(f"{function.__qualname__} takes no batch_size: make it its first argument")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of your function
        if IN_TRIAL in os.environ:
            what = f"{function.__qualname__} was called while a trial imported its module"
            raise RuntimeError(f"{what}: call it under 'if __name__ == \"__main__\":'")
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        plain = all(isinstance(value, bool | int | float | str) for value in given.values())
        name = _importable(function) if plain and len(args) < len(names) else None

        def here(**sizes: Any) -> Any:  # noqa: ANN401 - of your function
            return function(sizes[names[0]], *args, **kwargs)

        fixed = OwnCode(arguments={**asked.code.arguments, **(given if name else {})})
        tried = function if name else functools.update_wrapper(here, function)
        found = _found(replace(asked, code=fixed), device, tried, names[0], name)
        return function(found.value, *args, **kwargs)

    call.__dict__[WRAPPED] = function
    return call


@contextlib.contextmanager
def _opened(
    choice: DeviceChoice, code: OwnCode, timeout_s: float, functions: Mapping[str, Callable[..., Any]] | None
) -> Iterator[OwnBench]:
    """Open a bench of fresh processes; for ``functions`` by role that only this process has, one of this process."""
    try:
        if functions is None:
            with open_own(choice, code, timeout_s, shared=True) as bench:
                yield bench
            return
        from autotune.integrations.jobs.in_process import InThisProcess

        server = InThisProcess({code.functions[role]: function for role, function in functions.items()})
        with open_bench(choice, Path(), server, shared=True, loading="nothing: trials run here") as opened:
            hashes = {f"{role}_sha256": _source_sha256(function) for role, function in functions.items()}
            subject = Subject(**code.model_dump() | hashes)
            yield opened.extended(OwnBench, subject=subject, directory=Path(), in_this_process=True)
    except (AutotuneError, TrainerError) as error:
        error.add_note(f"next: {error.next_step}")
        raise


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _importable(function: Callable[..., Any]) -> str | None:
    """Return the name by which another process can import a function; None if it cannot."""
    path, module = getattr(function, "__qualname__", "<"), getattr(function, "__module__", None)
    if "<" in path or module is None or getattr(function, "__closure__", None) or not sys.modules.get(module):
        return None
    if module != "__main__":
        return f"{module}:{path}"
    file = getattr(sys.modules[module], "__file__", None)
    return f"{Path(file).resolve()}:{path}" if file and file.endswith(".py") and Path(file).is_file() else None


def _label(function: Callable[..., Any]) -> str:
    """Return a name for a function that cannot be imported."""
    return f"{function.__module__}:{function.__qualname__.rpartition('.')[2].strip('<>')}"


def _source_sha256(function: Callable[..., Any]) -> str:
    """Return a hash of a function's file, code, and the plain values that it closes over."""
    code, file = getattr(function, "__code__", None), inspect.getsourcefile(inspect.unwrap(function))
    said = Path(file).read_bytes() if file and Path(file).is_file() else b""
    cells = [cell.cell_contents for cell in getattr(inspect.unwrap(function), "__closure__", None) or ()]
    values = [repr(value) for value in cells if isinstance(value, bool | int | float | str)]
    return hashlib.sha256(said + (code.co_code if code else b"") + "\n".join(values).encode()).hexdigest()


def _seconds(value: str | float) -> float:
    return parse_seconds(value) if isinstance(value, str) else float(value)
