"""The fastest gradient synchronisation, and measured steps on several nodes."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.base.answer_json import jsonable
from autotune.base.files import write_atomically
from autotune.base.log import LOG
from autotune.base.wording import plural
from autotune.errors import BadInput
from autotune.evidence.network import NetworkEvidence, ScalingRow
from autotune.evidence.probe import ProbeEvidence
from autotune.machine.measured_device import local_ranks
from autotune.network.decide.scaling_model import Scaling, ScalingModel
from autotune.network.scaling import predict_scaling, with_measured
from autotune.network.stage import nodes_here, open_ranks
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench, with_subject
from autotune.subjects.mlm.gradient_sync import tokens_of_epoch, with_global_batch
from autotune.subjects.mlm.network.evidence import evidence
from autotune.subjects.mlm.network.measure import (
    NetworkRequest,
    NetworkTuning,
    measured_row,
    parallel_settings,
)
from autotune.subjects.registry import profile_subject
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Display
from autotune.trials.trial_log import report_directory
from trainer.formats.events import utc_now
from trainer.formats.progress import progress


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
    nodes: int | None,
    bench: SubjectBench | None = None,
    display: Display | None = None,
) -> tuple[NetworkEvidence, float]:
    """Measure gradient synchronisation for the profile.

    It is the part of ``autotune.network.stage`` that chooses the trainer's strategy.
    ``bench`` is not used, as ranks are started on other machines. Other arguments, the
    result and errors are those of ``measure_network``.
    """
    train, place = stored.profile.train, report_directory(stored.path, request.reports)
    ranks = request.local_ranks or require_local_probe(stored).local_ranks
    nodes = nodes or nodes_here()
    with open_multirank(
        stored,
        request.data,
        place,
        nodes,
        ranks,
        warns_if_busy=display is None,
    ) as opened:
        ranks_bench = opened
        if display is not None:
            ranks_bench = replace(opened, display=display)
        probe = require_local_probe(stored, ranks_bench.fingerprint)
        asked = _network_request(
            stored, probe, request, nodes, local_ranks(ranks_bench.site, ranks)
        )
        with ranks_bench.phase("network", stored.path, request, 20) as runner:
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
    changed = stored.profile.with_train(train)
    profile = add_evidence(stored.profile, "network", found, runner, changed)
    write_atomically(stored.path, profile_to_toml(profile))
    return found, ranks_bench.server.waited_s


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
