"""Profiles of ``own_steps`` on this machine, without a probe."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autotune.evidence.profile import Constraints, Evidence
from autotune.profiles.store import StoredProfile, read_profile, write_profile
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.new_profile import new_profile
from autotune.subjects.own.subject import FunctionSubject
from autotune.trials.sweep_request import SweepRequest

DIRECTORY = Path(__file__).parent
TIMEOUT_S = 120.0
TUNED_SIZE = 16


def own_code(step: str, *, loader: bool = False, **fields: object) -> FunctionSubject:
    """Return a step of ``own_steps``, with its loader if requested."""
    names = {"step_function": f"own_steps:{step}"}
    if loader:
        names["loader_function"] = "own_steps:build_loader"
    return FunctionSubject(**names, **fields)


@contextlib.contextmanager
def bench_of(code: FunctionSubject, **options: object) -> Iterator[SubjectBench]:
    """Open a bench on this CPU that has imported the code."""
    with open_subject(
        "cpu", code, DIRECTORY, import_timeout_s=TIMEOUT_S, **options
    ) as bench:
        yield bench


def write_own_profile(
    path: Path, bench: SubjectBench, **settings: object
) -> StoredProfile:
    """Write a profile with these settings, and read it."""
    runner = bench.runner(
        path.parent / "reports", bench.fingerprint, lambda *_: None, 1
    )
    profile = new_profile(
        bench,
        runner,
        command="probe",
        settings={"micro_batch_size": TUNED_SIZE, **settings},
        constraints=Constraints(),
        evidence=Evidence(),
    )
    write_profile(path, profile)
    return read_profile(path)


def request_in(directory: Path, **changes: object) -> SweepRequest:
    """Return a request for short windows."""
    request = SweepRequest(
        reports=directory / "reports",
        budget_s=60.0,
        window_s=0.05,
        trial_timeout_s=TIMEOUT_S,
    )
    return replace(request, **changes)
