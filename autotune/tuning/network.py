"""The network stage: links and steps of ranks together, and the fastest exchange, written into the profile."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from autotune.core.defaults import TRIAL_TIMEOUT_S
from autotune.core.evidence import NetworkEvidence
from autotune.core.profile import profile_to_toml
from autotune.decide.choose import rows_with_headroom
from autotune.errors import BadInput
from autotune.search.network import NetworkRequest, NetworkTuning
from autotune.search.network_evidence import evidence, links_in_place_of
from autotune.search.profiles import StoredProfile, report_directory, with_links, with_network
from autotune.store import write_atomically
from autotune.tuning.bench import check_belongs, trial_runner
from autotune.tuning.display import PLAIN, Display
from autotune.tuning.together import TogetherBench, open_together
from trainer.batch import in_rows
from trainer.dataset import Manifest, TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAsked:
    """How the network is to be measured."""

    data: Path
    reports: Path
    minutes: float
    nodes: int
    ranks: int
    """On each."""
    links_only: bool = False
    trial_timeout_s: float = TRIAL_TIMEOUT_S


def tune_network(
    stored: StoredProfile, asked: NetworkAsked, manifest: Manifest, display: Display = PLAIN
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
    train = stored.profile.train
    place = report_directory(stored.path, asked.reports)
    with open_together(train.device, asked.data, place, asked.nodes, asked.ranks) as bench:
        fingerprint = bench.fingerprint(train.model, manifest)
        check_belongs(stored, fingerprint)
        request = _request(bench, stored, asked.data, 60 * asked.minutes, asked.trial_timeout_s)
        with display.show(f"network {train.model.name}", most_s=60 * asked.minutes) as update:
            trials = 1 if asked.links_only else 20
            runner = trial_runner(bench.machine, place / "ledger", fingerprint, update, trials, display=display)
            tuning = NetworkTuning(request=request, runner=runner)
            if asked.links_only:
                tuning.measure_links()
            else:
                tuning.run()
    return _keep(stored, tuning), bench.machine.waited_s


def _request(
    bench: TogetherBench, stored: StoredProfile, data_dir: Path, budget_s: float, trial_timeout_s: float
) -> NetworkRequest:
    probe, train, before = stored.profile.evidence.probe, stored.profile.train, stored.profile.evidence.network
    assert probe is not None
    if before is not None and before.default_rows is not None:
        # What an earlier tuning made of the probed micro-batch is no default; and its trials are taken up again.
        train = train.model_copy(update={"micro_batch_rows": before.default_rows})
    with contextlib.closing(TokenDataset.open(data_dir)) as dataset:
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
        data_dir=str(data_dir.resolve()),
        nodes=bench.nodes,
        ranks_per_node=bench.ranks_per_node,
        most_rows=max(train.micro_batch_rows, most),
        real_tokens_per_row=probe.mean_real_tokens_per_row,
        budget_s=budget_s,
        trial_timeout_s=trial_timeout_s,
    )


def _keep(stored: StoredProfile, tuning: NetworkTuning) -> NetworkEvidence:
    """Write what was found into the profile; links alone change nothing about how it trains."""
    found = evidence(tuning)
    if tuning.tried:
        chosen, _ = tuning.fastest()
        rows = tuning.micro_batch_rows(chosen.candidate)
        changed = with_network(stored.profile, found, chosen.candidate.exchange, rows, tuning.runner)
    else:
        found = links_in_place_of(stored.profile.evidence.network, found)
        changed = with_links(stored.profile, found, tuning.runner)
    write_atomically(stored.path, profile_to_toml(changed))
    return found
