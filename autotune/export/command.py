"""``autotune profile export``: settings of a profile for another trainer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from autotune.base.tables import printable_line
from autotune.console import options as opt
from autotune.subjects.mlm.export.targets import TargetName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.evidence.argument import Argument
    from autotune.subjects.mlm.export.table import Export


def export(
    *,
    profile: opt.OneProfile,
    to: Annotated[
        TargetName,
        opt.option(
            None,
            "Target: TrainingArguments, accelerate's config file, or Lightning's"
            " Trainer arguments.",
        ),
    ],
    out: Annotated[
        Path | None,
        opt.option(
            "PATH",
            "JSON file to write, with PATH.remarks.json beside it. Default: print.",
        ),
    ] = None,
    nodes: Annotated[int, opt.NODES] = 1,
    ranks: opt.NodeRanks = None,
    data: opt.ProfileData = None,
    as_json: opt.AsJson = False,
) -> None:
    """Export a profile to another trainer.

    Standard error lists the settings that differ or have no equivalent, and code to add
    to your program.
    """
    from autotune.launch.training_job import default_ranks
    from autotune.profiles.store import read_profile
    from autotune.subjects.mlm.export.translate import export_profile
    from autotune.subjects.mlm.memory.contents import sequence_means

    stored = read_profile(profile)
    if not stored.profile.has_train:
        _export_own(stored.profile.settings, to, out, as_json=as_json)
        return
    result = export_profile(
        stored.profile,
        sequence_means(stored, data),
        to,
        nodes=nodes,
        ranks_per_node=ranks or default_ranks(stored.profile),
    )
    _write_export(result, out, as_json=as_json)


def _write_export(result: "Export", out: Path | None, *, as_json: bool) -> None:
    """Write the settings and remarks of an export to files, or print them.

    Args:
        result: Export to write.
        out: File of settings; the remarks go to a file beside it.
        as_json: True to print the whole export, without text on standard error.
    """
    from autotune.base.answer_json import answer_json
    from autotune.base.files import write_atomically
    from autotune.subjects.mlm.export.text import export_text

    answer = answer_json(result)
    if not as_json:
        sys.stderr.write(f"{export_text(result)}\n")
    settings_json = json.dumps(result.arguments, indent=2)
    shown = settings_json
    if out is not None:
        remarks = out.with_name(f"{out.stem}.remarks.json")
        write_atomically(out, f"{settings_json}\n")
        write_atomically(remarks, f"{answer}\n")
        shown = f"settings: {out}\nremarks:  {remarks}"
    print(answer if as_json else shown)


def _export_own(
    settings: "Mapping[str, Argument]",
    target: TargetName,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Export the settings of your own training code.

    Args:
        settings: Tuned values by argument.
        target: Trainer to export to.
        out: File of settings to write, if the target takes any in a file; None prints
            them.
        as_json: True to print settings and code as JSON.
    """
    from autotune.base.answer_json import answer_json
    from autotune.base.files import write_atomically
    from autotune.subjects.mlm.export.translate import export_own_values

    arguments, calls = export_own_values(target, settings)
    if calls:
        sys.stderr.write("Add to your program:\n")
        for call in calls:
            sys.stderr.write(f"  {printable_line(call)}\n")
    settings_json = json.dumps(arguments, indent=2)
    shown = settings_json
    if not arguments:
        shown = (
            f"settings: none are in a file of {target}; all are code for your program"
        )
    elif out is not None:
        write_atomically(out, f"{settings_json}\n")
        shown = f"settings: {out}"
    if as_json:
        shown = answer_json({"arguments": arguments, "calls": calls})
    print(shown)
