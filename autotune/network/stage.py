"""The network phase of a tuning: links between ranks, and what they cost in a step."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autotune.base.files import write_atomically
from autotune.base.log import LOG
from autotune.base.wording import plural
from autotune.cluster.torchrun import STARTER_VARIABLE, on_nodes_of_job, on_this_node
from autotune.errors import BadInput, MachineLacks, NotCheckable
from autotune.evidence.network import NetworkEvidence
from autotune.machine.measured_device import DeviceChoice, local_ranks
from autotune.network.link_measurement import measure_links
from autotune.network.own_step import ROUNDS, measure_on_ranks, own_evidence
from autotune.profiles.local_probe import require_local
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.parts import part_of
from autotune.subjects.registry import profile_subject
from autotune.trials.multirank import MultirankMachine
from autotune.trials.opened_bench import open_measured_device
from autotune.trials.other_programs import load_of_others, warn_if_busy
from autotune.trials.rounds import Rounds
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench, Display
from autotune.trials.trial_log import report_directory


def nodes_here() -> int:
    """Return the number of nodes of the SLURM job that this process is in.

    Outside of a job, it is 1.
    """
    count = (
        os.environ.get("SLURM_NNODES") or os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    )
    return int(count) if count.isdecimal() and os.environ.get("SLURM_JOB_ID") else 1


@contextlib.contextmanager
def open_ranks(
    choice: DeviceChoice,
    data_dir: Path,
    scratch_parent: Path,
    nodes: int,
    ranks: int | None,
    *,
    alone: bool = False,
    warns_if_busy: bool = True,
) -> Iterator[Bench]:
    """Start ranks on this node, or on the first nodes of this job.

    The site is that of the first node. A single rank is an error unless ``alone``. All
    nodes must share ``scratch_parent``, for requests and answers. ``warns_if_busy`` is
    False if the command has warned.

    Raises:
        BadInput: If the job has fewer nodes.
        MachineLacks: If device, torch, srun, second rank or link is missing.
    """
    there = nodes_here()
    if nodes > there:
        what = (
            f"{plural(nodes, 'node')} requested, but this"
            f" {'job has' if there > 1 else 'process is on'} {there}"
        )
        raise BadInput(
            what, next_step=f"Submit a job of {plural(nodes, 'node')}: add --slurm."
        )
    with open_measured_device(choice, data_dir, ("torch",)) as (site, _):
        each = local_ranks(site, ranks)
        if nodes * each < 2 and not alone:
            raise MachineLacks(
                "a network measurement requires at least 2 GPUs (or 2 ranks on a CPU)",
                next_step=(
                    "Add --ranks 2, or --slurm for a job of two nodes. To predict"
                    " without a measurement: autotune network PROFILE --predict"
                    " --bandwidth 25Gbit"
                ),
            )
        if (
            nodes > 1
            and shutil.which("srun") is None
            and not os.environ.get(STARTER_VARIABLE)
        ):
            raise MachineLacks(
                "srun not found",
                next_step=(
                    "Add --slurm SITE, with the container as command_prefix in the site"
                    " file (it must pass the environment on), or measure on one node:"
                    " --nodes 1."
                ),
            )
        torch = site.versions["torch"]
        start = (
            on_this_node(each, torch)
            if nodes == 1
            else on_nodes_of_job(nodes, each, torch)
        )
        scratch_parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".together-", dir=scratch_parent))
        load_average_1min = load_of_others(site.host)
        if warns_if_busy:
            warn_if_busy(site.host, load_average_1min)
        with MultirankMachine(start, site.device, scratch) as ranks_together:
            LOG.info(
                "measuring on %s; starting %d ranks on %s",
                site.words,
                nodes * each,
                plural(nodes, "node"),
            )
            ranks_together.start()
            yield Bench(
                site=site,
                server=ranks_together,
                machine=ranks_together,
                load_average_1min=load_average_1min,
            )


def measure_network(
    stored: StoredProfile,
    request: SweepRequest,
    nodes: int | None,
    bench: SubjectBench | None = None,
    display: Display | None = None,
) -> tuple[NetworkEvidence, float]:
    """Measure links and steps on several ranks, and write the evidence into a profile.

    Args:
        stored: Profile of any subject.
        request: Number of ranks, and time limits.
        nodes: Number of nodes; None takes as many of this job as the subject can be
            measured on.
        bench: A bench of the subject; None opens one if it is needed.
        display: Shows the progress; None shows it in one line.

    Returns:
        The evidence, and seconds of waiting for the ranks.

    Raises:
        NotCheckable: If the subject is not measured on several nodes, or the size is
            not known.
        BadInput: If your code fails on several ranks, there are fewer nodes than
            requested, or a global batch has fewer sequences than ranks.
        MachineLacks: If ranks cannot be started.
        ProfileRejected: If the profile is of another machine, subject or dataset.
        Undecided: If links or steps could not be measured.
    """
    measure = part_of(stored.profile.subject.kind, "network", _measure_step)
    return measure(stored, request, nodes, bench, display)


def require_one_node(stored: StoredProfile, nodes: int | None) -> None:
    """Check that a step of yours is not to be measured on several nodes.

    Raises:
        NotCheckable: If it is.
    """
    if nodes is None or nodes == 1:
        return
    raise NotCheckable(
        f"your own step is measured on one node, and --nodes {nodes} was requested",
        next_step=(
            "Measure the ranks of this node with --ranks, then predict nodes:"
            f" autotune network {stored.path} --predict --bandwidth 25Gbit"
        ),
    )


def _measure_step(
    stored: StoredProfile,
    request: SweepRequest,
    nodes: int | None,
    bench: SubjectBench | None,
    display: Display | None,
) -> tuple[NetworkEvidence, float]:
    """Measure the links of ranks, and the step on one rank and on all of them."""
    require_one_node(stored, nodes)
    ranks = request.local_ranks or stored.profile.local_ranks
    place = report_directory(stored.path, request.reports)
    device: DeviceChoice = stored.profile.fingerprint.device
    with open_ranks(
        device, Path(), place, 1, ranks, warns_if_busy=display is None
    ) as together:
        shown = together if display is None else replace(together, display=display)
        ranks = local_ranks(shown.site, ranks)
        with shown.tuning(
            f"links {stored.profile.subject.name}",
            stored.path,
            stored.profile.fingerprint,
            request,
            trials=1,
        ) as runner:
            links = measure_links(
                Rounds(runner=runner),
                shown.site.device,
                nodes=1,
                ranks_per_node=ranks,
                timeout_s=request.trial_timeout_s,
            )
    with contextlib.ExitStack() as stack:
        code_bench = bench
        if code_bench is None:
            code_bench = stack.enter_context(
                open_subject(
                    device,
                    profile_subject(stored.profile),
                    import_timeout_s=request.trial_timeout_s,
                )
            )
        require_local(stored, code_bench.fingerprint)
        with code_bench.phase("network", stored.path, request, 2 * ROUNDS) as runner:
            steps = measure_on_ranks(code_bench, stored, request, ranks, runner)
            found = own_evidence(links, steps, runner)
        write_atomically(
            stored.path,
            profile_to_toml(add_evidence(stored.profile, "network", found, runner)),
        )
    return found, together.server.waited_s
