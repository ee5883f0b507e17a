"""``autotune profile``: read a profile, verify it on this machine, learn why it says what it says."""

from typing import Annotated

import typer

from autotune.console.options import REPORTS, AsJson, OneProfile, ProfileData, Reports

app = typer.Typer(help="Read, check and explain profiles.", no_args_is_help=True, rich_markup_mode=None)


@app.command("show")
def show(
    *,
    profile: OneProfile,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Print a profile's decisions with their reasons."""
    from autotune.base.document import answer_json, plain
    from autotune.profiles.approval import read_reviewed
    from autotune.profiles.sections import profile_text

    stored = read_reviewed(profile, reports)
    if as_json:
        print(answer_json({**plain(stored.profile), "intact": stored.intact, "review": stored.standing.state}))
    else:
        print(profile_text(stored.profile, stored.standing, intact=stored.intact))


@app.command("verify")
def verify(
    *,
    profile: OneProfile,
    data: ProfileData = None,
    require_approved: Annotated[
        bool, typer.Option("--require-approved", help="Refuse it as well unless it was approved as it is.")
    ] = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Hold a profile against this machine, field by field, and against its ledger; nothing is measured."""
    from autotune.base.document import answer_json
    from autotune.machine.host import SystemHost
    from autotune.machine.nvml import NvmlMonitor
    from autotune.profiles import approval as reviews
    from autotune.profiles.store import read_trials
    from autotune.profiles.sections import verification_text
    from autotune.trials.fork_server import ForkServerMachine

    def read_cuda() -> str | None:
        with ForkServerMachine() as server:
            server.start()
            return server.versions.get("cuda")

    stored = reviews.read_reviewed(profile, reports)
    _, _, ledger = read_trials(profile, stored.profile, reports)
    monitor = NvmlMonitor()
    try:
        found = reviews.verify(stored, data, SystemHost(), monitor, read_cuda, ledger=ledger)
    finally:
        monitor.close()
    if as_json:
        said = {"profile": profile, "intact": stored.intact, "review": stored.standing.state}
        print(answer_json({**said, "ledger": ledger, "checks": found.checks}))
    else:
        print(verification_text(found, stored.standing, intact=stored.intact))
    if require_approved or stored.standing.state in ("rejected", "voided"):
        reviews.require_approved(profile, reports)
    found.raise_if_bad(str(profile))


@app.command("explain")
def explain(
    *,
    profile: OneProfile,
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="One setting, such as data.loader_workers, or a group.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say of each setting whether it was measured, asked for, or is a default; with the figures behind it."""
    from autotune.base.document import answer_json
    from autotune.profiles.decide.explain import explanations, of_key
    from autotune.profiles.store import read_profile
    from autotune.advice.sections import explanation_text, explanations_text
    from autotune.search.sections import exploration_text

    read = read_profile(profile).profile
    found = explanations(read)
    chosen = found if key is None else of_key(found, key)
    if as_json:
        print(answer_json(chosen))
    else:
        print(explanations_text(chosen) if key is None else "\n\n".join(map(explanation_text, chosen)))
        if key is None and read.evidence.explore is not None:
            print(f"\n{exploration_text(read.evidence.explore)}")
