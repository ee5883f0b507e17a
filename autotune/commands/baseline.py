"""``autotune baseline``: what the tuned settings are worth, against the defaults and the paper's style."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.jobs import DryRun, JobRequest, Slurm, Wait, arguments_of, submitted
from autotune.commands.options import REPORTS, AsJson, Here, ProfileData, Reports, TrialTimeout, Window
from autotune.core.defaults import TRIAL_TIMEOUT_S, WINDOW_S


def baseline(
    context: typer.Context,
    *,
    profile: Annotated[
        Path, typer.Option(help="A profile that autotune probe wrote on this machine.", autocompletion=profiles)
    ],
    data: ProfileData = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Local ranks that train together. Default: as the profile was probed.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Windows of each at most; fewer where ratios are known to 5 %.")
    ] = 10,
    window_s: Window = WINDOW_S,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time after which no round begins any more; three are always measured.")
    ] = 5.0,
    trial_timeout: TrialTimeout = TRIAL_TIMEOUT_S,
    slurm: Slurm = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    here: Here = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Train for some windows as tuned, by default and in the paper's style, and write what that is worth."""
    from autotune.commands.login_node import refuse_login_node
    from autotune.search.profiles import probed_here, read_profile, report_directory
    from autotune.show.answers import answer_json
    from autotune.show.baseline import baseline_text
    from autotune.tuning.baseline import BaselineAsked, compare_recipes
    from autotune.tuning.bench import open_bench
    from trainer.dataset import read_manifest

    stored = read_profile(profile)
    probe = probed_here(stored, refusals=[])
    train = stored.profile.train
    job = JobRequest(
        name=f"baseline-{train.model.name}",
        purpose=f"Measures what the tuned settings of {train.model.name} are worth, and writes it into {stored.path}.",
        ledger=str(report_directory(stored.path, reports) / "ledger"),
        expected_minutes=minutes + 1,
        trial_timeout_s=trial_timeout,
        ranks=ranks or probe.local_ranks,
        on_gpus=train.device == "cuda",
        cpus=stored.profile.fingerprint.allotted_cpus,
        reports=reports,
    )
    if submitted(context, job, slurm, wait=wait, dry_run=dry_run, as_json=as_json):
        return
    if not here:
        refuse_login_node(["autotune", *arguments_of(context)])
    asked = BaselineAsked(
        data=stored.data_dir(data),
        reports=reports,
        minutes=minutes,
        ranks=ranks,
        rounds=rounds,
        window_s=window_s,
        trial_timeout_s=trial_timeout,
    )
    manifest = read_manifest(asked.data)
    with open_bench(train.device, asked.data) as bench:
        found = compare_recipes(bench, stored, probe, asked, manifest)
    print(answer_json(found) if as_json else baseline_text(found, profile))
