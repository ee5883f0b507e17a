"""``autotune network``: how ranks reach each other, what that costs a step, and the fastest exchange of gradients."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, TRIAL_TIMEOUT_S, AsJson, Here, ProfileData, Reports, TrialTimeout

if TYPE_CHECKING:
    from autotune.commands.together import TogetherBench
    from autotune.core.evidence import NetworkEvidence
    from autotune.core.profile import Fingerprint
    from autotune.search.network import NetworkRequest, NetworkTuning
    from autotune.search.profiles import StoredProfile

_LINKS_MINUTES = 3.0


def network(
    context: typer.Context,
    *,
    profile: Annotated[Path, typer.Option(help="A profile that autotune probe wrote on such machines.")],
    data: ProfileData = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of this SLURM job to use. Default: all; with --slurm 2.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on each. Default: as the profile was probed.")] = None,
    links_only: Annotated[bool, typer.Option("--links-only", help="Measure messages, and no training step.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all measurements.")] = 15.0,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Measure links and steps of ranks together, and write the fastest exchange at the same global batch."""
    from autotune.commands.measuring import check_belongs, refuse_login_node
    from autotune.commands.together import nodes_here, open_together
    from autotune.search.profiles import probed_here, read_profile, report_directory
    from autotune.show.network import network_text
    from trainer.dataset import read_manifest

    stored = read_profile(profile)
    probe = probed_here(stored, refusals=[])
    train = stored.profile.train
    job = JobRequest(
        name=f"network-{train.model.name}",
        purpose=f"Measures the network between nodes, and how {train.model.name} trains best over it.",
        ledger=str(report_directory(stored.path, reports) / "ledger"),
        expected_minutes=1 + (_LINKS_MINUTES if links_only else minutes),
        trial_timeout_s=trial_timeout,
        nodes=nodes or 2,
        ranks=ranks or probe.local_ranks,
        on_gpus=train.device == "cuda",
        cpus=stored.profile.fingerprint.allotted_cpus,
        with_srun=False,
        reports=reports,
    )
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    data_dir = data or profile.parent / (train.data.path or ".")
    manifest = read_manifest(data_dir)
    place = report_directory(stored.path, reports)
    used = nodes or nodes_here()
    with open_together(train.device, data_dir, place, used, ranks or probe.local_ranks) as bench:
        fingerprint = bench.fingerprint(train.model, manifest)
        check_belongs(stored, fingerprint)
        request = _request(bench, stored, data_dir, 60 * minutes, trial_timeout)
        tuning = _tune(bench, request, fingerprint, place / "ledger", links_only=links_only)
    found = _keep(stored, tuning)
    print(json.dumps(found.model_dump(), indent=2) if as_json else network_text(found, profile))


def _request(
    bench: "TogetherBench", stored: "StoredProfile", data_dir: Path, budget_s: float, trial_timeout_s: float
) -> "NetworkRequest":
    from autotune.decide.choose import rows_with_headroom
    from autotune.errors import BadInput
    from autotune.search.network import NetworkRequest
    from trainer.batch import in_rows
    from trainer.dataset import TokenDataset

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


def _tune(
    bench: "TogetherBench", request: "NetworkRequest", here: "Fingerprint", ledger: Path, *, links_only: bool
) -> "NetworkTuning":
    from autotune.commands.measuring import trial_runner
    from autotune.search.network import NetworkTuning
    from trainer.progress import progress

    with progress(f"network {request.config.model.name}") as update:
        runner = trial_runner(bench.machine, ledger, here, update, expected_trials=1 if links_only else 20)
        tuning = NetworkTuning(request=request, runner=runner)
        if links_only:
            tuning.measure_links()
        else:
            tuning.run()
    return tuning


def _keep(stored: "StoredProfile", tuning: "NetworkTuning") -> "NetworkEvidence":
    """Write what was found into the profile; links alone change nothing about how it trains."""
    from autotune.core.profile import profile_to_toml
    from autotune.search.network_evidence import evidence, links_in_place_of
    from autotune.search.profiles import with_links, with_network
    from autotune.store import write_atomically

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
