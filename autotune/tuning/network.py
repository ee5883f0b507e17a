"""What is measured between ranks: the network stage with the fastest exchange, and steps on more nodes."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.core.evidence import NetworkEvidence, ProbeEvidence, Scaling, ScalingRow
from autotune.core.profile import profile_to_toml
from autotune.decide.choose import rows_with_headroom
from autotune.errors import BadInput
from autotune.search.network import NetworkRequest, NetworkTuning
from autotune.search.profiles import StoredProfile, probed_here, report_directory, with_evidence, with_network
from autotune.search.scaling import (
    ScalingModel,
    evidence,
    links_in_place_of,
    measured_row,
    predict_scaling,
    with_measured,
)
from autotune.search.workers import SweepRequest
from autotune.show.answers import plain
from autotune.store import write_atomically
from autotune.tuning.bench import Display
from autotune.tuning.together import TogetherBench, nodes_here, open_together
from trainer.batch import in_rows
from trainer.dataset import TokenDataset, read_manifest
from trainer.events import utc_now
from trainer.plan import SPECIAL_TOKENS_PER_SAMPLE
from trainer.progress import progress

SCALING_STEPS = 8


def tune_network(
    stored: StoredProfile,
    request: SweepRequest,
    nodes: int,
    display: Display | None = None,
    *,
    links_only: bool = False,
) -> tuple[NetworkEvidence, float]:
    """Measure with ranks that run together, and write what was found into the profile.

    Returns:
        What was found, and the seconds that this process has waited for the ranks.

    Raises:
        BadInput: If there are not so many nodes, or the global batch has fewer rows than there are ranks.
        MachineLacks: If ranks cannot be started.
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If links or steps could not be measured.
    """
    train, place = stored.profile.train, report_directory(stored.path, request.reports)
    ranks = request.ranks or probed_here(stored).local_ranks
    with open_together(train.device, request.data, place, nodes, ranks) as opened:
        bench = opened if display is None else replace(opened, display=display)
        asked = _network_request(bench, stored, bench.check_belongs(stored), request)
        with bench.stage("network", stored, request, 1 if links_only else 20) as runner:
            tuning = NetworkTuning(request=asked, runner=runner)
            if links_only:
                tuning.measure_links()
            else:
                tuning.run()
    found = evidence(tuning)
    if tuning.tried:
        chosen = tuning.fastest()[0].candidate
        rows = tuning.micro_batch_rows(chosen)
        changed = with_network(stored.profile, found, chosen.exchange, rows, runner)
    else:  # links alone change nothing about how it trains
        found = links_in_place_of(stored.profile.evidence.network, found)
        changed = with_evidence(stored.profile, "network", found, runner)
    write_atomically(stored.path, profile_to_toml(changed))
    return found, bench.server.waited_s


def _network_request(
    bench: TogetherBench, stored: StoredProfile, probe: ProbeEvidence, request: SweepRequest
) -> NetworkRequest:
    train, before = stored.profile.train, stored.profile.evidence.network
    if before is not None and before.default_rows is not None:
        # What an earlier tuning made of the probed micro-batch is no default; and its trials are taken up again.
        train = train.model_copy(update={"micro_batch_rows": before.default_rows})
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        train = in_rows(train, dataset)
    every = bench.nodes * bench.ranks_per_node
    if train.global_batch_rows < every:
        raise BadInput(
            f"a global batch of {train.global_batch_rows} rows is fewer than the {every} ranks",
            next_step="Measure fewer ranks (--ranks, --nodes), or probe again with a larger --global-batch-tokens.",
        )
    most = rows_with_headroom(probe.feasible_max, stored.profile.constraints.headroom_share)
    return NetworkRequest(
        config=train,
        data_dir=str(request.data.resolve()),
        nodes=bench.nodes,
        ranks_per_node=bench.ranks_per_node,
        most_rows=max(train.micro_batch_rows, most),
        real_tokens_per_row=probe.mean_real_tokens_per_row,
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
    """Predict training on these numbers of nodes, and measure it on those that this job has.

    The prediction is written before anything is measured, so that nobody can fit it afterwards.
    """
    place = report_directory(stored.path, reports)
    predicted = predict_scaling(stored.profile.train.model.name, known, counts, _rows_per_epoch(stored, data))
    kept = {"predicted_utc": utc_now(), **plain(predicted)}
    write_atomically(place / "scaling-predicted.json", json.dumps(kept, indent=1) + "\n")
    there, measured = nodes_here(), {}
    for row in predicted.rows:
        if 1 < there >= row.nodes:
            step = measured[row.nodes] = _on_nodes(
                stored, known, row, stored.data_dir(data), place, trial_timeout_s=trial_timeout_s
            )
            sys.stderr.write(
                f"{predicted.name}: {row.nodes} nodes: {step.step_s:.4g} s a step, predicted {row.step_s:.4g} s\n"
            )
    return with_measured(predicted, measured) if measured else predicted


def _on_nodes(
    stored: StoredProfile, known: ScalingModel, row: ScalingRow, data_dir: Path, place: Path, *, trial_timeout_s: float
) -> ScalingRow:
    """Measure steps on so many nodes, with the exchange that was predicted to be best there."""
    train, load = stored.profile.train, known.load
    ranks = known.network.ranks_per_node  # as predicted: another number would have another dealing
    with open_together(train.device, data_dir, place, row.nodes, ranks, alone=True) as bench:
        request = NetworkRequest(
            config=train.model_copy(update={"global_batch_rows": load.global_batch_rows}),
            data_dir=str(data_dir.resolve()),
            nodes=row.nodes,
            ranks_per_node=ranks,
            most_rows=load.most_rows,
            real_tokens_per_row=load.real_tokens_per_row,
            budget_s=trial_timeout_s,
            trial_timeout_s=trial_timeout_s,
        )
        with progress(f"scale {train.model.name}, {row.nodes} nodes") as update:
            runner = bench.runner(place, bench.fingerprint(train.model), update, expected_trials=1)
            return measured_row(NetworkTuning(request=request, runner=runner), known, row, SCALING_STEPS)


def _rows_per_epoch(stored: StoredProfile, data: Path | None) -> float | None:
    """Return the rows of one pass over the dataset; None if it is not here."""
    directory, probe = stored.data_here(data), stored.profile.evidence.probe
    if probe is None or directory is None:
        return None
    train = read_manifest(directory).train
    tokens = sum(shard.tokens for shard in train.shards) + SPECIAL_TOKENS_PER_SAMPLE * train.samples
    return tokens / probe.mean_real_tokens_per_row
