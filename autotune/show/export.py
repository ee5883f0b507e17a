"""A profile in the words of another trainer: its file of settings, and what that file cannot say."""

import json

from autotune.core.advice import Figure
from autotune.core.export import Equivalent, Export, Scalar
from autotune.core.units import format_count, format_share
from autotune.show.explain import figure_text
from autotune.show.tables import inert, text_table

_VALUE_CHARACTERS = 24


def arguments_text(export: Export) -> str:
    """The file that the other trainer reads."""
    return json.dumps(export.arguments, indent=2) + "\n"


def export_text(export: Export) -> str:
    """A step before and after, what differs, what is lost and was worth, and the warnings; for people.

    Settings that mean the same are only counted: the file holds them.
    """
    lost = [one for one in export.settings if one.equivalence == "none"]
    near = [one for one in export.settings if one.equivalence == "near"]
    calls = [one.elsewhere for one in export.settings if one.elsewhere is not None]
    same = sum(one.equivalence == "same" and one.value is not None for one in export.settings)
    parts = [
        _batch_text(export),
        f"{same} settings mean the same there. Others come near:",
        text_table(("here", "there", "how it differs"), [[one.setting, _there(one), one.remark] for one in near]),
        "No equivalent:",
        text_table(("here", "value", "instead"), [[one.setting, _short(one.ours), one.remark] for one in lost]),
        "In the program that calls it:\n" + "\n".join(f"  {inert(call)}" for call in calls),
    ]
    if worth := _worth(export):
        parts.append("What is lost was worth:\n" + "\n".join(f"  {line}" for line in worth))
    return "\n\n".join([*parts, "\n".join(f"warning: {inert(warning)}" for warning in export.warnings)])


def _worth(export: Export) -> list[str]:
    """One line for each figure, with all settings that it is of."""
    settings: dict[Figure, list[str]] = {}
    for one in export.settings:
        for figure in one.worth:
            settings.setdefault(figure, []).append(one.setting)
    return [inert(f"{', '.join(names)}: {figure_text(figure)}") for figure, names in settings.items()]


def _batch_text(export: Export) -> str:
    batch = export.batch
    ranks = f"{batch.ranks} {'rank' if batch.ranks == 1 else 'ranks'}"
    rows = [
        [
            "in a micro-batch of a rank",
            f"{batch.rows_per_microbatch_per_rank} rows",
            f"{batch.samples_per_microbatch_per_rank} samples",
        ],
        [
            f"in a step of {ranks}",
            f"{format_count(batch.rows_per_step)} rows",
            f"{format_count(batch.exported_samples_per_step)} samples, {_batches(batch.accumulation_steps)} a rank",
        ],
        ["samples in a row", _number(batch.samples_per_row), "1"],
        [
            "real tokens in a step",
            format_count(batch.real_tokens_per_step),
            format_count(batch.exported_real_tokens_per_step),
        ],
        [
            "places that hold real tokens",
            format_share(batch.fill_share),
            f"{format_share(batch.exported_fill_share)} of whole rows",
        ],
    ]
    return text_table((f"for {export.written_for}", "this trainer", "the export"), rows)


def _batches(count: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _there(one: Equivalent) -> str:
    if one.argument is None:
        return one.elsewhere or ""
    return one.argument if one.value is None else f"{one.argument} = {json.dumps(one.value)}"


def _short(value: Scalar) -> str:
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
