"""Table of an export: each setting with its equivalent in another trainer. Pure.

From this table follow the arguments in the file of settings, and the code that takes
the rest. An argument of the file is its bare name, ``max_steps``; an argument that only
code can pass is ``function(argument)``, ``AdamW(lr)``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Target = Literal["hf-trainer", "accelerate", "lightning"]
Equivalence = Literal["same", "near", "none"]
"""``same``: trains the same. ``near``: has a similar effect in the other trainer.
``none``: is lost."""
Scalar = str | int | float | bool | None
Value = Scalar | list[str] | dict[str, Scalar]
"""Values that a JSON file of settings can hold."""


class Raw(str):
    """A value that is an expression, and is therefore written without quotes."""

    __slots__ = ()

    # ``written_calls`` writes the repr of each value, which has quotes for other text.
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One setting or ability of this trainer, and its equivalent in the other one."""

    setting: str
    """Dotted key under ``[train]``, a whole table of it, or a few words if no key
    decides it."""
    argument: str | None
    """Name in the other trainer, as ``function(argument)`` if the calling program
    passes it; None if it has none."""
    value: Value
    """Value in the other trainer; None leaves it at that trainer's default."""
    equivalence: Equivalence
    remark: str
    """Difference, or what happens instead; empty if the setting means the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBatch:
    """Optimizer step in both trainers.

    Here a sequence may hold many samples, in the other trainer it is one sample.
    """

    ranks: int
    """Ranks over all nodes."""
    sequences_per_step: int
    """Sequences of this trainer's optimizer step over all ranks."""
    samples_per_sequence: float | None
    """Samples of a sequence, on average; None if sequences are packed and the dataset
    is not found."""
    tokens_per_step: float | None
    """Non-padding tokens of this trainer's optimizer step over all ranks."""
    per_device_batch_size: int
    """Samples of a rank's micro-batch in the other trainer."""
    gradient_accumulation_steps: int
    """Micro-batches of a rank in an optimizer step of the other trainer."""
    exported_samples_per_step: int
    """Samples of the other trainer's optimizer step over all ranks."""
    exported_tokens_per_step: float | None
    """Non-padding tokens of the other trainer's optimizer step; None if the samples of
    a sequence are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Profile exported to another trainer."""

    written_for: str
    """Library and version whose names and meanings these are; a test loads the file
    with it."""
    model: str
    """Name of the model."""
    nodes: int
    ranks_per_node: int
    batch: ExportedBatch
    arguments: dict[str, Value]
    """Content of the file of settings, by the other trainer's names."""
    calls: tuple[str, ...]
    """Lines of code for the calling program, for settings that the file cannot hold."""
    settings: tuple[Equivalent, ...]
    warnings: tuple[str, ...]


def row(
    setting: str,
    argument: str | None = None,
    value: Value = None,
    *,
    near: str | None = None,
    lost: str | None = None,
) -> Equivalent:
    """Return one row of the table of settings.

    Args:
        setting: Dotted key of the setting, or a few words.
        argument: Its name in the other trainer.
        value: Its value in the other trainer.
        near: Difference, if its effect is only similar there.
        lost: What happens instead, if it is lost there.
    """
    equivalence: Equivalence = "same"
    remark = ""
    if lost is not None:
        equivalence = "none"
        remark = lost
    elif near is not None:
        equivalence = "near"
        remark = near
    return Equivalent(
        setting=setting,
        argument=argument,
        value=value,
        equivalence=equivalence,
        remark=remark,
    )


def file_arguments(settings: Iterable[Equivalent]) -> dict[str, Value]:
    """Return the arguments that the file of settings holds."""
    arguments: dict[str, Value] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        if "(" not in setting.argument:
            arguments[setting.argument] = setting.value
    return arguments


def written_calls(
    settings: Iterable[Equivalent], templates: Mapping[str, str]
) -> list[str]:
    """Return the lines of code that take the settings which the file cannot hold.

    Args:
        settings: Settings, of which those with ``function(argument)`` are taken.
        templates: Code by function, with ``{}`` in place of its arguments; it is left
            out if it has this place but no arguments.
    """
    arguments_by_function = _arguments_by_function(settings)
    lines: list[str] = []
    for function, template in templates.items():
        if function in arguments_by_function or "{}" not in template:
            arguments = ", ".join(arguments_by_function.get(function, []))
            # Templates hold braces of their own, so that str.format fails on them.
            lines += template.replace("{}", arguments).split("\n")
    return lines


def _arguments_by_function(settings: Iterable[Equivalent]) -> dict[str, list[str]]:
    """Return the arguments of each function, as code: ``lr=0.001``.

    An argument without a keyword, ``range()``, is positional.
    """
    arguments: dict[str, list[str]] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        function, bracket, keyword = setting.argument.rstrip(")").partition("(")
        if bracket:
            value = repr(setting.value)
            argument = f"{keyword}={value}" if keyword else value
            arguments.setdefault(function, []).append(argument)
    return arguments
