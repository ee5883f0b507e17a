"""An export as text: a step here and there, what differs, what has no equivalent, and the warnings."""

import json

from autotune.core.units import format_count
from autotune.decide.export import Equivalent, Export
from autotune.show.tables import inert, text_table


def export_text(export: Export) -> str:
    """Everything that the settings file does not say; settings that mean the same are only counted."""
    lost, near = ([one for one in export.settings if one.equivalence == kind] for kind in ("none", "near"))
    same = sum(one.equivalence == "same" and one.value is not None for one in export.settings)
    batch = export.batch
    tokens, exported = (format_count(one) for one in (batch.real_tokens_per_step, batch.exported_real_tokens_per_step))
    return "\n\n".join(
        [
            f"for {export.written_for}, ranks in all: {batch.ranks}; a step of {batch.rows_per_step:,} rows with "
            f"{tokens} non-padding tokens becomes one of {batch.exported_samples_per_step:,} samples with {exported}, "
            f"in {batch.accumulation_steps} micro-batches of {batch.samples_per_microbatch_per_rank} on each rank",
            f"{same} settings mean the same there. Others come near:",
            text_table(("here", "there", "how it differs"), [[one.setting, _there(one), one.remark] for one in near]),
            "No equivalent:",
            text_table(("here", "instead"), [[one.setting, one.remark] for one in lost]),
            "In the program that calls it:\n" + "\n".join(f"  {inert(call)}" for call in export.calls),
            "\n".join(f"warning: {inert(warning)}" for warning in export.warnings),
        ]
    )


def _there(one: Equivalent) -> str:
    return one.argument or "" if one.value is None else f"{one.argument} = {json.dumps(one.value)}"
