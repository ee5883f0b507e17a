"""``autotune profile``: read a profile and hold it against its own hash."""

import json
from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.options import AsJson

app = typer.Typer(help="Read profiles.", no_args_is_help=True)


@app.callback()
def _profile() -> None:
    """Read profiles."""


@app.command()
def show(
    *,
    profile: Annotated[Path, typer.Argument(help="A profile that autotune probe wrote.")],
    as_json: AsJson = False,
) -> None:
    """Print a profile's decisions with their reasons."""
    from autotune.search.profiles import read_profile
    from autotune.show.profile import profile_text

    stored = read_profile(profile)
    if as_json:
        print(json.dumps(stored.profile.model_dump(mode="json") | {"intact": stored.intact}, indent=2))
    else:
        print(profile_text(stored.profile, intact=stored.intact))
