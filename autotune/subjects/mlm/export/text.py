"""Text on an export: the settings that differ or are lost, and the code to add."""

import json

from autotune.base.tables import Row, printable_line, text_table
from autotune.base.units import format_count
from autotune.base.wording import plural
from autotune.subjects.mlm.export.table import Equivalence, Equivalent, Export


def export_text(export: Export) -> str:
    """Format the settings that differ or are lost, and the code to add.

    Settings that mean the same are only counted.
    """
    same = [
        setting
        for setting in _settings_with(export, "same")
        # Without a value, the setting has no effect or is part of another one.
        if setting.value is not None
    ]
    differing = [
        _differing_cells(setting) for setting in _settings_with(export, "near")
    ]
    lost = [
        [setting.setting, setting.remark] for setting in _settings_with(export, "none")
    ]
    library = export.written_for.partition(" ")[0]
    calls = [f"  {printable_line(call)}" for call in export.calls]
    warnings = [f"warning: {printable_line(warning)}" for warning in export.warnings]
    return "\n\n".join(
        (
            _batch_sentence(export),
            f"{len(same)} settings mean the same. These differ:",
            text_table(("profile", library, "difference"), differing),
            "No equivalent:",
            text_table(("profile", "instead"), lost),
            "\n".join(("Add to the calling program:", *calls)),
            "\n".join(warnings),
        )
    )


def _batch_sentence(export: Export) -> str:
    """Compare the optimizer steps of the profile and of its export."""
    batch = export.batch
    return (
        f"For {export.written_for} on {plural(batch.ranks, 'rank')}: a step of"
        f" {batch.sequences_per_step:,} sequences with"
        f" {format_count(batch.tokens_per_step)} non-padding tokens becomes one of"
        f" {batch.exported_samples_per_step:,} samples with"
        f" {format_count(batch.exported_tokens_per_step)}, in"
        f" {plural(batch.gradient_accumulation_steps, 'micro-batch')} of"
        f" {batch.per_device_batch_size} per rank"
    )


def _settings_with(export: Export, equivalence: Equivalence) -> list[Equivalent]:
    """Return the settings of an export whose equivalent is of this kind."""
    return [
        setting for setting in export.settings if setting.equivalence == equivalence
    ]


def _differing_cells(setting: Equivalent) -> Row:
    """Return a setting, its argument in the other trainer, and the difference."""
    argument = setting.argument or ""
    if setting.value is not None:
        argument = f"{setting.argument} = {json.dumps(setting.value)}"
    return [setting.setting, argument, setting.remark]
