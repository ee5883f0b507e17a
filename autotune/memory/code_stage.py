"""Probe of a step of yours, from request to written profile."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, TRIAL_TIMEOUT_S
from autotune.base.log import LOG
from autotune.base.units import format_bytes
from autotune.evidence.peak_contents import ContentsAt
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
)
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.machine.measured_device import (
    DeviceChoice,
    MeasuredDevice,
    local_ranks,
    memory_budget,
)
from autotune.memory.decide.overheads import overheads_on_cpu, overheads_on_gpu
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.measure import probe_subject
from autotune.memory.size_probe import FIT_STEPS_OF_CODE, SizeProbe
from autotune.memory.values import ModelTraceRequest
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import (
    WrittenProfile,
    keep_workers,
    write_profile,
)
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.code_profile import new_profile
from autotune.subjects.subject import Argument, Subject
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import report_directory
from autotune.trials.values import FinishedTrial

MAX_SIZE = 2**20
"""Largest size to try by default: a small model takes very large micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProbe:
    """Request to find the largest size of a step of yours.

    A field that is None takes the default of the machine.
    """

    subject: Subject
    reports: Path
    choice: Mapping[str, Argument] = field(default_factory=dict)
    """Settings of the subject besides the size; those that are missing are as the
    subject has them."""
    memory_bytes: int | None = None
    headroom_share: float = HEADROOM_SHARE
    max_size: int = MAX_SIZE
    multiple_of: int = 1
    allow_varying: bool = False
    contents: ContentsAt = "none"
    starts_at_most: bool = False
    """True if ``max_size`` is tried first, because it is likely to fit."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    ranks: int | None = None
    """Ranks of this node that take the steps together; None for one."""
    traced: bool = True
    """True if ``build_model`` in the module of the step is traced before any trial."""
    measures_throughput: bool = True
    """False to search for the largest size alone."""
    study_file: Path | None = None
    """File to which the probe writes its Optuna study; None for no file."""


def probe_own(
    choice: DeviceChoice,
    probe: StepProbe,
    out: Path | None,
    *,
    ends_s: float | None = None,
) -> WrittenProfile:
    """Find the largest size of a step of yours, and write a profile."""

    def check(site: MeasuredDevice) -> None:
        memory_budget(
            site, probe.memory_bytes, ranks=local_ranks(site, probe.ranks or 1)
        )

    with open_subject(
        choice, probe.subject, import_timeout_s=probe.trial_timeout_s, check=check
    ) as bench:
        (path,) = profile_paths(out, [probe.subject.name], bench.site.name)
        return probe_step(bench, probe, path, ends_s=ends_s)


def probe_step(
    bench: SubjectBench,
    probe: StepProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
) -> WrittenProfile:
    """Find the largest size on an open bench, and write the profile at ``path``.

    Args:
        bench: Machine on which trials of the step run.
        probe: The step and its limits.
        path: Path of the profile, which also names the trial log.
        traced: Prediction of ``build_model``, if it was traced before.
        ends_s: Time after which no trial begins, in seconds since 1970.
    """
    profile, trials = profile_of_step(bench, probe, path, traced, ends_s=ends_s)
    profile = keep_workers(profile, path)
    write_profile(path, profile)
    return WrittenProfile(path=path, profile=profile, trials=trials)


def profile_of_step(
    bench: SubjectBench,
    probe: StepProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
) -> tuple[Profile, tuple[FinishedTrial, ...]]:
    """Return the profile of a probe, not written yet, and every trial.

    Arguments are as for ``probe_step``.
    """
    size, evidence, runner, budget_bytes = run_probe(
        bench, probe, path, traced, ends_s=ends_s
    )
    profile = new_profile(
        bench,
        runner,
        probe.subject,
        command="probe",
        settings={probe.subject.size.name: size, **probe.choice},
        constraints=Constraints(
            memory_budget_bytes=budget_bytes, headroom_share=probe.headroom_share
        ),
        evidence=Evidence(probe=evidence),
    )
    return profile, tuple(runner.finished)


def run_probe(
    bench: SubjectBench,
    probe: StepProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
) -> tuple[int, ProbeEvidence, TrialRunner, int]:
    """Find the largest size, with the trial log of the profile at ``path``.

    Returns:
        The chosen size, the evidence, the runner of the trials, and the memory budget
        in bytes.
    """
    ranks = local_ranks(bench.site, probe.ranks or 1)
    budget = memory_budget(bench.site, probe.memory_bytes, ranks=ranks)
    left = (
        f" ({format_bytes(RESERVE_BYTES)} of the GPU stay free; change the budget with"
        " --memory)"
    )
    left = left if bench.site.gpu is not None and probe.memory_bytes is None else ""
    per_rank = " per rank" if ranks > 1 else ""
    LOG.info(
        "%s: memory budget %s%s%s",
        probe.subject.words,
        format_bytes(budget),
        per_rank,
        left,
    )
    with bench.display.show(f"probe {probe.subject.words}") as update:
        runner = bench.runner(
            report_directory(path, probe.reports), bench.fingerprint, update, 8
        )
        runner.budget_ends_s = ends_s
        size, evidence = probe_subject(
            replace(
                size_probe_of(bench, probe, budget, ranks),
                study_name=f"{path.stem}: {_study_of(probe)}",
            ),
            runner,
            bench.site.host.ram_available_bytes,
            traced,
        )
    return size, evidence, runner, budget


def _study_of(probe: StepProbe) -> str:
    """Return the name of a probe's study within its profile."""
    return "probe of the explored settings" if probe.choice else "probe"


def size_probe_of(
    bench: SubjectBench, probe: StepProbe, budget_bytes: int, ranks: int
) -> SizeProbe:
    """Return the search for the largest size of a step of yours, with its limits."""
    subject, site = probe.subject, bench.site
    step = subject.step(probe.choice)
    assert step is not None, f"{subject.words} has no step"
    trace, overheads = None, None
    if bench.model is not None and probe.traced:
        trace = ModelTraceRequest(
            model=bench.model,
            arguments=dict(step.arguments),
            along=subject.size.name,
            device=site.device,
            directory=bench.import_directory or ".",
        )
        overheads = overheads_on_cpu()
        if site.gpu is not None:
            overheads = overheads_on_gpu(
                site.gpu.compute_capability, ranks, site.cuda_bytes
            )
    server = bench.server
    return SizeProbe(
        subject=subject,
        device=site.device,
        memory_budget_bytes=budget_bytes,
        max_size=probe.max_size,
        fit_steps=FIT_STEPS_OF_CODE,
        fit_choice=probe.choice,
        timed_choice=probe.choice,
        multiple_of=probe.multiple_of,
        headroom_share=probe.headroom_share,
        trial_timeout_s=probe.trial_timeout_s,
        local_ranks=ranks,
        device_used_before_bytes=bench.used_before_bytes(ranks),
        trace=trace,
        overheads=overheads,
        allow_varying=probe.allow_varying,
        contents=probe.contents,
        starts_at_most=probe.starts_at_most,
        measures_throughput=probe.measures_throughput,
        study_file=probe.study_file,
        source_sha256=bench.source_sha256("step"),
        directory=bench.import_directory,
        in_this_process=bench.in_this_process,
        load_modules=(
            server.load
            if isinstance(server, ForkServerMachine) and bench.forked
            else lambda _modules: False
        ),
    )
