"""The network phase of a tuning, and measured steps on several nodes.

The phase finds the fastest gradient synchronisation.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.answer_json import jsonable
from autotune.base.files import write_atomically
from autotune.base.log import LOG
from autotune.base.wording import plural
from autotune.cluster.torchrun import STARTER_VARIABLE, on_nodes_of_job, on_this_node
from autotune.errors import BadInput, MachineLacks, NotCheckable
from autotune.evidence.network import NetworkEvidence, ScalingRow
from autotune.evidence.probe import ProbeEvidence
from autotune.machine.measured_device import DeviceChoice, local_ranks
from autotune.network.decide.scaling_model import Scaling, ScalingModel
from autotune.network.link_measurement import measure_links
from autotune.network.measure import (
    NetworkRequest,
    NetworkTuning,
    measured_row,
    parallel_settings,
)
from autotune.network.own_step import ROUNDS, measure_on_ranks, own_evidence
from autotune.network.scaling import evidence, predict_scaling, with_measured
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local, require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench, open_subject, with_subject
from autotune.subjects.mlm.gradient_sync import tokens_of_epoch, with_global_batch
from autotune.subjects.registry import profile_subject
from autotune.trials.multirank import MultirankMachine
from autotune.trials.opened_bench import open_measured_device
from autotune.trials.other_programs import load_of_others, warn_if_busy
from autotune.trials.rounds import Rounds
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench, Display
from autotune.trials.trial_log import report_directory
from trainer.formats.events import utc_now
from trainer.formats.progress import progress


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


@contextlib.contextmanager
def open_multirank(
    stored: StoredProfile,
    data_dir: Path,
    scratch_parent: Path,
    nodes: int,
    ranks: int | None,
    *,
    alone: bool = False,
    warns_if_busy: bool = True,
) -> Iterator[SubjectBench]:
    """Start ranks for trials of a profile's subject, as ``open_ranks`` does."""
    subject = profile_subject(stored.profile, data_dir)
    with open_ranks(
        stored.profile.device,
        data_dir,
        scratch_parent,
        nodes,
        ranks,
        alone=alone,
        warns_if_busy=warns_if_busy,
    ) as bench:
        yield with_subject(bench, subject)


def tune_network(
    stored: StoredProfile,
    request: SweepRequest,
    nodes: int,
    display: Display | None = None,
) -> tuple[NetworkEvidence, float]:
    """Measure gradient synchronisation for the profile.

    Returns:
        The evidence, and seconds of waiting for the ranks.

    Raises:
        BadInput: If there are fewer nodes than requested, or fewer sequences in a
            global batch than ranks.
        MachineLacks: If ranks cannot be started.
        ProfileRejected: If the profile is of another machine, model or dataset.
        Undecided: If links or steps could not be measured.
    """
    train, place = stored.profile.train, report_directory(stored.path, request.reports)
    ranks = request.local_ranks or require_local_probe(stored).local_ranks
    with open_multirank(
        stored,
        request.data,
        place,
        nodes,
        ranks,
        warns_if_busy=display is None,
    ) as opened:
        bench = opened if display is None else replace(opened, display=display)
        probe = require_local_probe(stored, bench.fingerprint)
        asked = _network_request(
            stored, probe, request, nodes, local_ranks(bench.site, ranks)
        )
        with bench.phase("network", stored.path, request, 20) as runner:
            tuning = NetworkTuning(request=asked, runner=runner)
            tuning.run()
    found = evidence(tuning)
    chosen = tuning.fastest()[0].candidate
    parallel = train.parallel.model_copy(
        update=parallel_settings(chosen.sync, found.ranks_per_node)
    )
    train = train.model_copy(
        update={
            "parallel": parallel,
            "micro_batch_size": tuning.micro_batch_size(chosen),
        }
    )
    write_atomically(
        stored.path,
        profile_to_toml(add_evidence(stored.profile, "network", found, runner, train)),
    )
    return found, bench.server.waited_s


def measure_own_network(
    stored: StoredProfile,
    request: SweepRequest,
    nodes: int,
    *,
    bench: SubjectBench | None = None,
    display: Display | None = None,
) -> tuple[NetworkEvidence, float]:
    """Measure the links of ranks, and a step of yours on one rank and on all of them.

    The evidence is written into the profile.

    Args:
        stored: Profile of your own code.
        request: Number of ranks, and time limits.
        nodes: Number of nodes, which must be 1.
        bench: A bench that has imported your code; None opens one.
        display: Shows the progress; None shows it in one line.

    Returns:
        The evidence, and seconds of waiting for the ranks.

    Raises:
        NotCheckable: If several nodes are requested, or the size is not known.
        MachineLacks: If ranks cannot be started.
        ProfileRejected: If the profile is of another machine, or your code has changed.
        BadInput: If your code fails on several ranks.
        Undecided: If links or steps could not be measured.
    """
    if nodes > 1:
        raise NotCheckable(
            f"your own step is measured on one node, and --nodes {nodes} was requested",
            next_step=(
                "Measure the ranks of this node with --ranks, then predict nodes:"
                f" autotune network {stored.path} --predict --bandwidth 25Gbit"
            ),
        )
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


def _network_request(
    stored: StoredProfile,
    probe: ProbeEvidence,
    request: SweepRequest,
    nodes: int,
    ranks_per_node: int,
) -> NetworkRequest:
    train, before = stored.profile.train, stored.profile.evidence.network
    if before is not None:
        # Start from the probed micro-batch and not from an earlier choice, so that its
        # trials are reused.
        train = train.model_copy(
            update={"micro_batch_size": before.default_micro_batch_size}
        )
    train = with_global_batch(train, request.data)
    every = nodes * ranks_per_node
    if train.global_batch_size < every:
        what = (
            f"a global batch of {train.global_batch_size} sequences is too small for"
            f" {every} ranks"
        )
        next_step = (
            "Use fewer ranks (--ranks, --nodes), or probe again with a larger"
            " --global-batch-tokens."
        )
        raise BadInput(what, next_step=next_step)
    most = with_headroom(probe.feasible_max, stored.profile.constraints.headroom_share)
    return NetworkRequest(
        config=train,
        data_dir=str(request.data.resolve()),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        max_micro_batch_size=max(train.micro_batch_size, most),
        tokens_per_sequence=probe.tokens_per_sequence,
        budget_s=request.budget_s,
        trial_timeout_s=request.trial_timeout_s,
    )


def scale_profile(
    stored: StoredProfile,
    known: ScalingModel,
    counts: Sequence[int],
    *,
    data: Path | None,
    reports: Path,
    trial_timeout_s: float,
) -> Scaling:
    """Predict training on each number of nodes, and measure it if possible.

    It is measured on the numbers of nodes that this job has. The prediction is written
    before the measurement, so that it cannot be fitted afterwards.
    """
    place, sequences = report_directory(stored.path, reports), None
    directory, probe = stored.existing_data_dir(data), stored.profile.evidence.probe
    if probe is not None and directory is not None:
        sequences = tokens_of_epoch(directory) / probe.tokens_per_sequence
    predicted = predict_scaling(
        stored.profile.train.model.name, known, counts, sequences
    )
    kept = {"predicted_utc": utc_now(), **jsonable(predicted)}
    write_atomically(
        place / "scaling-predicted.json", json.dumps(kept, indent=1) + "\n"
    )
    there, measured = nodes_here(), {}
    for row in predicted.rows:
        if 1 < there >= row.nodes:
            step = _on_nodes(
                stored,
                known,
                row,
                stored.data_dir(data),
                place,
                trial_timeout_s=trial_timeout_s,
            )
            measured[row.nodes] = step
            told = f"{step.step_s:.4g} s per step, predicted {row.step_s:.4g} s"
            LOG.info("%s: %s: %s", predicted.name, plural(row.nodes, "node"), told)
    return with_measured(predicted, measured) if measured else predicted


def _on_nodes(
    stored: StoredProfile,
    known: ScalingModel,
    row: ScalingRow,
    data_dir: Path,
    place: Path,
    *,
    trial_timeout_s: float,
) -> ScalingRow:
    """Measure steps on the row's number of nodes.

    They use the gradient synchronisation predicted to be fastest there.
    """
    train, load = stored.profile.train, known.load
    # As predicted: another number changes the batch split.
    ranks = known.network.ranks_per_node
    with open_multirank(stored, data_dir, place, row.nodes, ranks, alone=True) as bench:
        request = NetworkRequest(
            config=train.model_copy(
                update={"global_batch_size": load.global_batch_size}
            ),
            data_dir=str(data_dir.resolve()),
            nodes=row.nodes,
            ranks_per_node=ranks,
            max_micro_batch_size=load.max_micro_batch_size,
            tokens_per_sequence=load.tokens_per_sequence,
            budget_s=trial_timeout_s,
            trial_timeout_s=trial_timeout_s,
        )
        with progress(
            f"scale {train.model.name}, {plural(row.nodes, 'node')}"
        ) as update:
            runner = bench.runner(place, bench.fingerprint, update, expected_trials=1)
            return measured_row(
                NetworkTuning(request=request, runner=runner), known, row, steps=8
            )
