"""A machine on which functions of a program are tried."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from autotune.api.shown_progress import Progress, display_of
from autotune.errors import AutotuneError
from autotune.machine.measured_device import DeviceChoice
from autotune.subjects.bench import SubjectBench, open_subject, with_subject
from autotune.subjects.jobs.describe import described_sha256
from autotune.subjects.jobs.load import named_parameters
from autotune.subjects.own.subject import IN_TRIAL, FunctionSubject
from autotune.trials.opened_bench import open_bench
from trainer.formats.errors import TrainerError

MeasuredIn = Literal["fresh processes", "this process"]
"""Processes that ran the trials. In ``fresh processes`` results are exact; in ``this
process``, what earlier trials left in memory counts."""


@contextlib.contextmanager
def opened_bench(
    device: DeviceChoice,
    subject: FunctionSubject,
    timeout_s: float,
    functions_here: Mapping[str, Callable[..., Any]] | None,
    progress: Progress,
) -> Iterator[SubjectBench]:
    """Open a bench whose trials run in fresh processes, or in this one.

    Args:
        device: Device as the caller chose it.
        subject: Names of the functions, with their fixed arguments.
        timeout_s: Time limit of a trial.
        functions_here: Functions by role, if another process cannot import them all:
            they are tried in this process. None for fresh processes.
        progress: As ``Progress``.

    Raises:
        RuntimeError: If a trial imports the module that began the search.
        AutotuneError: If the device or a function cannot be used. A note has the next
            step, as for all errors inside of the context.
    """
    if IN_TRIAL in os.environ:
        raise RuntimeError(
            f"the search for {subject.words} began while a trial imported its module:"
            " begin it under 'if __name__ == \"__main__\":'"
        )
    if functions_here is None:
        opened = open_subject(device, subject, import_timeout_s=timeout_s, shared=True)
    else:
        opened = _bench_here(device, subject, functions_here)
    try:
        with opened as bench:
            yield replace(bench, display=display_of(progress))
    except (AutotuneError, TrainerError) as error:
        error.add_note(f"next: {error.next_step}")
        raise


@contextlib.contextmanager
def _bench_here(
    device: DeviceChoice,
    subject: FunctionSubject,
    functions: Mapping[str, Callable[..., Any]],
) -> Iterator[SubjectBench]:
    """Open a bench whose trials run in this process.

    Args:
        device: Device as the caller chose it.
        subject: Names of the functions, with their fixed arguments.
        functions: The functions by role.
    """
    # Imports torch, which fresh processes do without this one.
    from autotune.api.jobs.in_process import InThisProcess

    names = subject.code()
    server = InThisProcess({names[role]: functions[role] for role in functions})
    loader_parameters: frozenset[str] = frozenset()
    if "loader" in functions:
        loader_parameters = named_parameters(functions["loader"])
    with open_bench(
        device,
        Path(),
        lambda _: server,
        shared=True,
        loading="nothing: trials run here",
    ) as opened:
        yield with_subject(
            opened,
            subject,
            sources={role: described_sha256(functions[role]) for role in functions},
            loader_parameters=loader_parameters,
            directory=Path(),
            in_this_process=True,
        )
