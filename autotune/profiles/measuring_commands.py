"""Parts that the commands that measure a profile's training share."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.console.slurm_job import JobRequest
from autotune.trials.sweep_request import SweepRequest

if TYPE_CHECKING:
    from autotune.console.options import SweepOptions
    from autotune.profiles.store import StoredProfile


def sweep_request(
    options: "SweepOptions",
    stored: "StoredProfile",
    reports: Path,
    time_limit_s: float,
    **more: Any,
) -> SweepRequest:
    """Return the request for timed windows of a profile, which end in time.

    Args:
        options: Options of the command.
        stored: The profile.
        reports: Directory of reports, which has the trial logs.
        time_limit_s: Time limit of the command.
        more: Further fields of the request.

    Raises:
        BadConfig: If no dataset is named.
    """
    return SweepRequest(
        data=stored.data_dir(options.data),
        reports=reports,
        budget_s=time_limit_s,
        local_ranks=options.ranks,
        trial_timeout_s=options.trial_timeout_s,
        budget_ends_s=time.time() + time_limit_s,
        **more,
    )


def profile_job(
    name: str,
    purpose: str,
    stored: "StoredProfile",
    request: SweepRequest,
    *,
    on_gpus: bool = True,
) -> JobRequest:
    """Return the job that measures a profile's training.

    Args:
        name: Name of the command.
        purpose: One line about the question that it answers.
        stored: The profile.
        request: Windows to measure, with their limits.
        on_gpus: False if a GPU's step is replayed without a GPU.
    """
    profile = stored.profile
    probe = profile.evidence.probe
    ranks = request.local_ranks
    if ranks is None and probe is not None:
        ranks = probe.local_ranks
    return JobRequest(
        name=f"{name}-{profile.subject.name}",
        purpose=purpose,
        trial_log=str(request.reports / stored.path.stem / "trials"),
        expected_minutes=request.budget_s / 60 + 1,
        trial_timeout_s=request.trial_timeout_s,
        ranks=ranks,
        on_gpus=on_gpus and profile.device == "cuda",
        cpus=profile.fingerprint.allotted_cpus,
        reports=request.reports,
    )
