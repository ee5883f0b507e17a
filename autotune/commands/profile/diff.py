"""``autotune profile diff``: what one profile has otherwise than another."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.commands.options import AsJson

if TYPE_CHECKING:
    from autotune.decide.changes import Change


def diff(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A profile.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Show what differs between two profiles: settings, constraints, machine, figures."""
    from autotune.decide.changes import profile_changes
    from autotune.search.meanings import setting_meanings
    from autotune.search.profiles import read_profile
    from autotune.show.changes import changes_text

    changes = profile_changes(read_profile(a).profile, read_profile(b).profile)
    if as_json:
        tables = {field.name: getattr(changes, field.name) for field in dataclasses.fields(changes)}
        told = {name: [_json(change) for change in found] for name, found in tables.items()}
        print(json.dumps({"a": str(a), "b": str(b), "same_settings": not changes.train} | told, indent=2))
    else:
        print(changes_text(str(a), str(b), changes, setting_meanings()))


def _json(change: "Change") -> dict[str, object]:
    return dataclasses.asdict(change) | {"ratio": change.ratio}
