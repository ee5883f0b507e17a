"""``autotune profile diff``: what one profile has otherwise than another."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import AsJson


def diff(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A profile.", autocompletion=profiles)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", autocompletion=profiles)],
    as_json: AsJson = False,
) -> None:
    """Show what differs between two profiles: settings, constraints, machine, figures."""
    from autotune.decide.changes import profile_changes
    from autotune.search.profiles import read_profile
    from autotune.show.answers import answer_json
    from autotune.show.answers.profile import diff_answer
    from autotune.show.changes import changes_text

    changes = profile_changes(read_profile(a).profile, read_profile(b).profile)
    if as_json:
        print(answer_json(diff_answer(str(a), str(b), changes)))
    else:
        print(changes_text(str(a), str(b), changes))
