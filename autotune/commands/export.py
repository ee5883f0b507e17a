"""``autotune export``: a profile as the settings of another trainer, and what these cannot say."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from autotune.commands.options import AsJson, NodeRanks, OneProfile, ProfileData


def export(
    *,
    profile: OneProfile,
    to: Annotated[
        Literal["hf-trainer"], typer.Option(help="The other trainer: transformers' Trainer, as TrainingArguments.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the settings there, and beside them FILE.remarks.json. Default: print them.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that are to train together.")] = 1,
    ranks: NodeRanks = None,
    data: ProfileData = None,
    as_json: AsJson = False,
) -> None:
    """Write a profile's settings for another trainer; standard error says what has no equivalent."""
    from autotune.cluster.training import default_ranks
    from autotune.decide.export import export_profile
    from autotune.search.profiles import read_profile
    from autotune.search.row_contents import rows_hold
    from autotune.show.answers import answer_json
    from autotune.show.export import export_text
    from autotune.store import write_atomically

    stored = read_profile(profile)
    ranks_per_node = ranks or default_ranks(stored.profile)
    found = export_profile(stored.profile, rows_hold(stored, data), nodes=nodes, ranks_per_node=ranks_per_node)
    answer, arguments = answer_json(found), json.dumps(found.arguments, indent=2)
    if not as_json:
        sys.stderr.write(export_text(found) + "\n")
    if out is not None:
        remarks = out.with_name(f"{out.stem}.remarks.json")
        write_atomically(out, arguments + "\n")
        write_atomically(remarks, answer + "\n")
        print(answer if as_json else f"settings: {out}\nremarks:  {remarks}")
    else:
        print(answer if as_json else arguments)
