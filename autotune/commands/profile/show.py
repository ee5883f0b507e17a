"""``autotune profile show``: a profile's decisions."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import REPORTS, AsJson, Reports


def show(
    *,
    profile: Annotated[Path, typer.Argument(help="A profile that autotune probe wrote.", autocompletion=profiles)],
    reports: Reports = REPORTS,
    as_json: AsJson = False,
) -> None:
    """Print a profile's decisions with their reasons."""
    from autotune.search.reviews import read_reviewed
    from autotune.show.answers import answer_json, plain
    from autotune.show.profile import profile_text

    stored = read_reviewed(profile, reports)
    if as_json:
        print(answer_json({**plain(stored.profile), "intact": stored.intact, "review": stored.standing.state}))
    else:
        print(profile_text(stored.profile, stored.standing, intact=stored.intact))
