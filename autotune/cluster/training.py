"""A training run as a job: what the profile and the site say becomes its shape, its command and its patience. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster.batch import Shape, TrainJob
from autotune.cluster.site import SiteFile, SlurmSettings
from autotune.cluster.torchrun import Meeting, torchrun_command
from autotune.core.profile import Profile
from autotune.errors import BadInput
from trainer.config import TrainConfig, accumulation_steps

_STATE_BYTES_PER_PARAMETER = 12
"""Weights and AdamW's two moments, in 32 bits."""
_SLOW_DISK_BYTES_PER_S = 100e6
_UNKNOWN_STATE_BYTES = 2**30
_LEAVING_S = 60.0
_LEAST_LEAD_S = 120
_SHUTDOWN_MARGIN_S = 15
"""torchrun gives up before SLURM does, so that the script still says how it ended."""
START_UP_S = 60.0
_MEASURED_MARGIN = 1.25
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What is to be trained, and how much of the cluster it gets."""

    profile_path: Path
    profile: Profile
    config: TrainConfig
    """The profile's, with what the command line overrides."""
    data_dir: Path
    assignments: Sequence[str]
    """``train.key=value``, as the command line gave them."""
    run: Path
    nodes: int
    ranks: int
    """On each node."""
    chain: int
    time: str | None
    python: str
    torch_version: str
    code_sha256: str
    directory: Path
    """Where relative paths begin."""
    reviews: Path | None = None
    """Where the job finds at each of its starts whether the profile is approved; None where it need not be."""
    approved_sha256: str | None = None
    """By which a run's record names the profile that was approved; None where it need not be."""


def default_ranks(profile: Profile) -> int:
    """One for each GPU that the profile was tuned with; on CPUs as in its evidence."""
    if profile.train.device == "cuda":
        return max(1, profile.fingerprint.gpu_count)
    return profile.local_ranks


def training_job(request: TrainRequest, site: SiteFile) -> TrainJob:
    """The job.

    Raises:
        BadInput: If the time limit leaves nothing to train in.
    """
    shape = _shape(request, site)
    lead_s = site.slurm.term_lead_s or term_lead_s(request)
    limit_s = SlurmSettings(time=shape.time or site.slurm.time).time_s
    if limit_s < START_UP_S + lead_s:
        raise BadInput(
            f"the job's time limit, {shape.time or site.slurm.time}, cannot hold its start ({START_UP_S:g} s) and a "
            f"save at its end ({lead_s} s)",
            next_step="Raise it: --time, or slurm.time in the site file.",
        )
    meeting = Meeting(
        nodes=request.nodes,
        endpoint="$endpoint",
        job="$SLURM_JOB_ID",
        address="$address",
        is_host="$is_host",
    )
    command = torchrun_command(
        request.python,
        [],
        ranks=request.ranks,
        torch_version=request.torch_version,
        meeting=meeting,
        shutdown_s=lead_s - _SHUTDOWN_MARGIN_S,
    )
    return TrainJob(
        name=f"train-{request.run.name}",
        model=request.config.model.name,
        run=request.run,
        script=request.run / "train.sbatch",
        shape=shape,
        ranks=request.ranks,
        autotune=[request.python, "-m", "autotune"],
        torchrun=command,
        trainer=trainer_arguments(request, stage_to=site.node_local_path),
        preflight=_preflight(request, shape.cpus),
        term_lead_s=lead_s,
        chain=request.chain,
        approved_sha256=request.approved_sha256,
        directory=request.directory,
    )


def trainer_arguments(request: TrainRequest, *, stage_to: str | None) -> list[str]:
    """What each rank runs; a dataset is staged where the site has local disks and the profile says nothing else."""
    words = ["-m", "trainer", "--profile", str(request.profile_path), "--data", str(request.data_dir)]
    words += ["--out", str(request.run), "--resume", "auto"]
    if request.approved_sha256 is not None:
        words += ["--expect-profile-sha256", request.approved_sha256]
    for assignment in request.assignments:
        words += ["--set", assignment]
    if stage_to is not None and request.config.data.stage_to is None:
        words += ["--set", f"train.data.stage_to={stage_to}"]
    return words


def term_lead_s(request: TrainRequest) -> int:
    """How long before its end a job is to be told: two steps, a save to a slow disk, and time to leave.

    Left out: what other jobs take of the disk meanwhile.
    """
    probe = request.profile.evidence.probe
    parameters = request.profile.parameters
    state_bytes = _UNKNOWN_STATE_BYTES if parameters is None else parameters * _STATE_BYTES_PER_PARAMETER
    config = request.config
    micro_step_s = max((point.step_s for point in probe.curve), default=1.0) if probe else 1.0
    step_s = micro_step_s * accumulation_steps(config, request.nodes * request.ranks)
    return max(_LEAST_LEAD_S, math.ceil(_LEAVING_S + 2 * step_s + state_bytes / _SLOW_DISK_BYTES_PER_S))


def _shape(request: TrainRequest, site: SiteFile) -> Shape:
    slurm, here = site.slurm, request.profile.fingerprint
    cpus = here.allotted_cpus
    if slurm.cpus_per_rank is not None:
        cpus = slurm.cpus_per_rank * request.ranks
    elif slurm.cpus_per_task > 1:
        cpus = slurm.cpus_per_task
    return Shape(
        nodes=request.nodes,
        gpus=request.ranks if request.config.device == "cuda" else 0,
        cpus=cpus,
        memory_mib=_memory_mib(request.profile, cpus * slurm.memory_mib_per_cpu),
        time=request.time,
    )


def _memory_mib(profile: Profile, usual_mib: int) -> int:
    """What the site gives to so many processors; more where more was measured, never more than the node had."""
    workers = profile.evidence.workers
    rows = workers.rows if workers else []
    measured = [
        row.memory_bytes for row in rows if workers and row.loader_workers == workers.chosen and row.memory_bytes
    ]
    needed_mib = math.ceil(_MEASURED_MARGIN * max(measured, default=0) / _MIB)
    there_bytes = profile.fingerprint.ram_total_bytes
    wanted_mib = max(usual_mib, needed_mib)
    return wanted_mib if there_bytes is None else min(wanted_mib, there_bytes // _MIB)


def _preflight(request: TrainRequest, cpus: int) -> list[str]:
    words = ["launch", "preflight", "--profile", str(request.profile_path), "--data", str(request.data_dir)]
    words += ["--ranks", str(request.ranks), "--cpus", str(cpus), "--code", request.code_sha256]
    # Asked again by the job: it may wait for days, in which somebody edits the profile or takes the approval back.
    if request.reviews is not None:
        words += ["--require-approved", "--reports", str(request.reviews)]
    if request.approved_sha256 is not None:
        words += ["--profile-sha256", request.approved_sha256]
    return words
