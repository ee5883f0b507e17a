"""``autotune profile verify``: does a profile belong to this machine, this model and this dataset?"""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import REPORTS, AsJson, ProfileData, Reports


def verify(
    *,
    profile: Annotated[
        Path, typer.Argument(help="The profile that is held against this machine.", autocompletion=profiles)
    ],
    data: ProfileData = None,
    require_approved: Annotated[
        bool, typer.Option("--require-approved", help="Refuse it as well unless it was approved as it is.")
    ] = False,
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Hold a profile against this machine, field by field, and against its ledger; nothing is measured."""
    from autotune.measure.host import SystemHost
    from autotune.measure.machine import ForkServerMachine
    from autotune.measure.nvml import NvmlMonitor
    from autotune.search import reviews, verification
    from autotune.search.profiles import read_trials
    from autotune.show.answers import answer_json
    from autotune.show.profile import verification_text

    def read_cuda() -> str | None:
        with ForkServerMachine() as server:
            server.start()
            return server.versions.get("cuda")

    stored = reviews.read_reviewed(profile, reports)
    _, _, ledger = read_trials(profile, stored.profile, reports)
    monitor = NvmlMonitor()
    try:
        found = verification.verify(stored, data, SystemHost(), monitor, read_cuda, ledger=ledger)
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
