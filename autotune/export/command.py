"""``autotune profile export``: a profile as settings of another trainer, and what has no equivalent there."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from autotune.base.tables import inert, text_table
from autotune.base.units import format_count
from autotune.console.options import NODES, AsJson, NodeRanks, OneProfile, ProfileData, option

if TYPE_CHECKING:
    from autotune.export.decide import Export


def export(
    *,
    profile: OneProfile,
    to: Annotated[Literal["hf-trainer"], option(None, "Target: Hugging Face Trainer, as TrainingArguments.")],
    out: Annotated[
        Path | None, option("PATH", "JSON file to write, with PATH.remarks.json beside it. Default: print.")
    ] = None,
    nodes: Annotated[int, NODES] = 1,
    ranks: NodeRanks = None,
    data: ProfileData = None,
    as_json: AsJson = False,
) -> None:
    """Export a profile to Hugging Face Trainer.

    Standard error lists the settings that differ or have no equivalent.
    """
    from autotune.base.document import answer_json
    from autotune.base.files import write_atomically
    from autotune.export.decide import export_profile
    from autotune.launch.training_job import default_ranks
    from autotune.memory.estimate import sequence_means
    from autotune.profiles.store import read_profile

    stored = read_profile(profile)
    ranks_per_node = ranks or default_ranks(stored.profile)
    found = export_profile(stored.profile, sequence_means(stored, data), nodes=nodes, ranks_per_node=ranks_per_node)
    answer, arguments = answer_json(found), json.dumps(found.arguments, indent=2)
    if not as_json:
        sys.stderr.write(_export_text(found) + "\n")
    if out is not None:
        remarks = out.with_name(f"{out.stem}.remarks.json")
        write_atomically(out, arguments + "\n")
        write_atomically(remarks, answer + "\n")
        print(answer if as_json else f"settings: {out}\nremarks:  {remarks}")
    else:
        print(answer if as_json else arguments)


def _export_text(export: "Export") -> str:
    """Format what the settings file cannot express; settings that mean the same are only counted."""
    same = sum(one.equivalence == "same" and one.value is not None for one in export.settings)
    near = [
        [
            one.setting,
            one.argument or "" if one.value is None else f"{one.argument} = {json.dumps(one.value)}",
            one.remark,
        ]
        for one in export.settings
        if one.equivalence == "near"
    ]
    lost = [[one.setting, one.remark] for one in export.settings if one.equivalence == "none"]
    batch = export.batch
    tokens, exported = (format_count(one) for one in (batch.tokens_per_step, batch.exported_tokens_per_step))
    return "\n\n".join(
        [
            f"For {export.written_for} on {batch.ranks} GPUs: a step of {batch.sequences_per_step:,} sequences with "
            f"{tokens} non-padding tokens becomes one of {batch.exported_samples_per_step:,} samples with {exported}, "
            f"in {batch.gradient_accumulation_steps} micro-batches of {batch.per_device_batch_size} per GPU",
            f"{same} settings mean the same. These differ:",
            text_table(("profile", "Trainer", "difference"), near),
            "No equivalent:",
            text_table(("profile", "instead"), lost),
            "Add to the calling program:\n" + "\n".join(f"  {inert(call)}" for call in export.calls),
            "\n".join(f"warning: {inert(warning)}" for warning in export.warnings),
        ]
    )
