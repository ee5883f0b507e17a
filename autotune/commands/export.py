"""``autotune export``: a profile as the settings of another trainer, and what these cannot say."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.completion import profiles
from autotune.commands.options import AsJson, ProfileData
from autotune.core.targets import Target


def export(
    *,
    profile: Annotated[Path, typer.Argument(help="The profile.", autocompletion=profiles)],
    to: Annotated[Target, typer.Option(help="The other trainer: transformers' Trainer, as TrainingArguments.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the settings there, and beside them FILE.remarks.json. Default: print them.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that are to train together.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. Default: as the profile was measured.")
    ] = None,
    data: ProfileData = None,
    as_json: AsJson = False,
) -> None:
    """Write a profile's settings for another trainer; standard error says what has no equivalent, and what it costs."""
    from autotune.cluster.training import default_ranks
    from autotune.search.export import export_profile
    from autotune.search.profiles import read_profile
    from autotune.show.answers import answer_json
    from autotune.show.export import arguments_text, export_text
    from autotune.store import write_atomically

    stored = read_profile(profile)
    found = export_profile(stored, to, nodes=nodes, ranks_per_node=ranks or default_ranks(stored.profile), data=data)
    if not as_json:
        sys.stderr.write(export_text(found) + "\n")
    if out is None:
        print(answer_json(found) if as_json else arguments_text(found), end="\n" if as_json else "")
        return
    remarks = out.with_name(f"{out.stem}.remarks.json")
    write_atomically(out, arguments_text(found))
    write_atomically(remarks, answer_json(found) + "\n")
    print(answer_json(found) if as_json else f"settings: {out}\nremarks:  {remarks}")
