"""Script of a training job, from a profile and a site file.

The job restarts until the run is complete. ``train_script`` fills in
``cluster/templates/train.sbatch``.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.base.units import MIB
from autotune.cluster.job_script import Shape, cpus_of, lines_of, render, shared_values
from autotune.cluster.site_file import SiteFile, SlurmSettings
from autotune.cluster.torchrun import torchrun_command
from autotune.errors import BadInput
from autotune.evidence.profile import Profile
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps

_STATE_BYTES_PER_PARAMETER = 12
"""Bytes of a parameter in a checkpoint: the weight and AdamW's two moments, in 32
bits."""
_UNKNOWN_STATE_BYTES = 2**30
"""Size of a checkpoint if the number of parameters is not known, in bytes."""
_SLOW_DISK_BYTES_PER_S = 100e6
"""Speed of a slow disk, to which a checkpoint is saved."""
_EXIT_S = 60.0
"""Time for ranks to exit, in seconds."""
_MIN_LEAD_S = 120
"""Least time before its end at which a job is signalled, in seconds."""
START_UP_S = 60.0
"""Time until a job's first step, in seconds."""
_SHUTDOWN_MARGIN_S = 15
"""Seconds by which torchrun stops before SLURM does, so that the script can report the
result."""
_MEMORY_MARGIN = 1.25
"""Memory to request, relative to the memory that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Training to run, and the resources of the cluster for it."""

    profile_path: Path
    profile: Profile
    config: TrainConfig
    """Configuration of the profile, with the overrides of the command line."""
    data_dir: Path
    """Directory of the dataset."""
    assignments: Sequence[str]
    """Overrides as given on the command line: ``train.key=value``."""
    run: Path
    """Directory of the run."""
    ranks: int
    """Ranks on each node."""
    torch_version: str
    """Version of the torch that ranks run."""
    code_sha256: str
    """Hash of the trainer's sources, which the job compares with its own."""
    directory: Path
    """Working directory of the job."""
    nodes: int = 1
    chain: int = 1
    """Number of dependent jobs."""
    time: str | None = None
    """Time limit of the job; None for the site's."""
    python: str = sys.executable
    reviews: Path | None = None
    """Reports directory in which the job checks the approval at each start; None if
    none is needed."""
    approved_sha256: str | None = None
    """SHA-256 of the approved profile, the only one to train from; None if no approval
    is required."""

    @property
    def script(self) -> Path:
        """Path of the job script."""
        return self.run / "train.sbatch"

    @property
    def log(self) -> Path:
        """Path of the job's log; the logs of its nodes are beside it."""
        return self.run / "logs" / "%j.log"


def default_ranks(profile: Profile) -> int:
    """Return the number of GPUs that the profile was tuned with.

    On CPUs, it is the number of ranks in the profile's evidence.
    """
    if profile.fingerprint.device == "cuda":
        return max(1, profile.fingerprint.gpu_count)
    return profile.local_ranks


def train_script(request: TrainRequest, site: SiteFile, template: str) -> str:
    """Return the script of a training job.

    Raises:
        BadInput: If the time limit leaves no time to train.
    """
    shape = _shape(request, site)
    lead_s = site.slurm.term_lead_s or term_lead_s(request)
    limit = shape.time or site.slurm.time
    if SlurmSettings(time=limit).time_s < START_UP_S + lead_s:
        raise BadInput(
            f"the job's time limit of {limit} leaves no time to train: start-up takes"
            f" {START_UP_S:g} s and the final save {lead_s} s",
            next_step="Raise the limit: --time-limit, or slurm.time in the site file.",
        )
    torchrun = torchrun_command(
        request.python,
        [],
        ranks=request.ranks,
        torch_version=request.torch_version,
        meeting=(request.nodes, "$endpoint", "$SLURM_JOB_ID"),
        shutdown_s=lead_s - _SHUTDOWN_MARGIN_S,
    )
    autotune = [request.python, "-P", "-m", "autotune"]
    requeue = site.slurm.requeue and request.chain == 1
    options = {
        "signal": f"TERM@{lead_s}",
        "requeue" if requeue else "no-requeue": "",
        "dependency": "singleton" if request.chain > 1 else None,
        "open-mode": "append",
        "output": str(request.log),
    }
    interface_option = ""
    if site.network.interface is not None:
        interface_option = f" --interface {shlex.quote(site.network.interface)}"
    name = f"train-{request.run.name}"
    values = shared_values(name, shape, site, request.directory, options) | {
        "model": request.config.model.name,
        "run": str(request.run),
        "script": str(request.script),
        "ranks": request.ranks,
        "chain": request.chain,
        "approved": request.approved_sha256,
        "requeue": requeue,
        "autotune": f"{site.command_prefix} {shlex.join(autotune)}".strip(),
        "preflight": lines_of(
            site.command_prefix, [*autotune, *_preflight(request, shape.cpus)]
        ),
        "torchrun": lines_of(site.command_prefix, torchrun, filled_in=True),
        "trainer": lines_of(
            "", trainer_arguments(request, stage_to=site.node_local_path)
        ),
        "interface_option": interface_option,
    }
    return render(template, values)


def trainer_arguments(request: TrainRequest, *, stage_to: str | None) -> list[str]:
    """Return the command of each rank.

    The dataset is staged to ``stage_to`` unless the configuration names a directory.
    """
    words = ["-m", "trainer", str(request.profile_path)]
    words += ["--data", str(request.data_dir)]
    words += ["--out", str(request.run), "--resume", "auto"]
    if request.approved_sha256 is not None:
        words += ["--expect-profile-sha256", request.approved_sha256]
    for assignment in request.assignments:
        words += ["--set", assignment]
    if stage_to is not None and request.config.data.stage_to is None:
        words += ["--set", f"train.data.stage_to={stage_to}"]
    return words


def term_lead_s(request: TrainRequest) -> int:
    """Return how many seconds before its end a job is signalled.

    It is the time of two steps, a save to a slow disk, and the exit.
    """
    parameters = request.profile.parameters
    if parameters is None:
        state_bytes = _UNKNOWN_STATE_BYTES
    else:
        state_bytes = parameters * _STATE_BYTES_PER_PARAMETER
    micro_batches_s = []
    if request.profile.evidence.probe is not None:
        micro_batches_s = [
            point.step_s for point in request.profile.evidence.probe.curve
        ]
    accumulation_steps = gradient_accumulation_steps(
        request.config, request.nodes * request.ranks
    )
    step_s = max(micro_batches_s, default=1.0) * accumulation_steps
    save_s = state_bytes / _SLOW_DISK_BYTES_PER_S
    return max(_MIN_LEAD_S, math.ceil(_EXIT_S + 2 * step_s + save_s))


def _shape(request: TrainRequest, site: SiteFile) -> Shape:
    """Return the site's resources for these ranks.

    The memory is larger if more was measured, at most that of the node.
    """
    fingerprint = request.profile.fingerprint
    cpus = cpus_of(site, request.ranks, fingerprint.allotted_cpus)
    measured_bytes = 0
    workers = request.profile.evidence.workers
    if workers is not None:
        for row in workers.rows:
            if row.num_workers == workers.chosen:
                measured_bytes = max(measured_bytes, row.memory_bytes or 0)
    site_mib = cpus * site.slurm.memory_mib_per_cpu
    needed_mib = math.ceil(_MEMORY_MARGIN * measured_bytes / MIB)
    node_mib = fingerprint.ram_total_bytes // MIB
    return Shape(
        nodes=request.nodes,
        gpus=request.ranks if request.config.device == "cuda" else 0,
        cpus=cpus,
        time=request.time,
        memory_mib=min(max(site_mib, needed_mib), node_mib),
    )


def _preflight(request: TrainRequest, cpus: int) -> list[str]:
    """Return the command by which each node is compared with the profile's machine."""
    words = ["job", "preflight", str(request.profile_path)]
    words += ["--data", str(request.data_dir)]
    words += ["--ranks", str(request.ranks), "--cpus", str(cpus)]
    words += ["--code", request.code_sha256]
    # The job checks again, as the profile may be modified or its approval withdrawn
    # while it is queued.
    if request.reviews is not None:
        words += ["--require-approved", "--reports", str(request.reviews)]
    if request.approved_sha256 is not None:
        words += ["--profile-sha256", request.approved_sha256]
    return words
