"""``autotune profile explain``: why each setting is what it is."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import AsJson


def explain(
    *,
    profile: Annotated[Path, typer.Argument(help="The profile.", autocompletion=profiles)],
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="One setting, such as data.loader_workers, or a group.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say of each setting whether it was measured, asked for, or is a default; with the figures behind it."""
    from autotune.decide.explain import explanations, of_key
    from autotune.search.profiles import read_profile
    from autotune.show.advice import explanation_text, explanations_text
    from autotune.show.answers import answer_json
    from autotune.show.tuning import exploration_text

    read = read_profile(profile).profile
    found = explanations(read)
    chosen = found if key is None else of_key(found, key)
    if as_json:
        print(answer_json(chosen))
    else:
        print(explanations_text(chosen) if key is None else "\n\n".join(map(explanation_text, chosen)))
        if key is None and read.evidence.explore is not None:
            print(f"\n{exploration_text(read.evidence.explore)}")
