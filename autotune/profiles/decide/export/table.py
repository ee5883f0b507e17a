"""Values of an export: the equivalent of each setting, the file's arguments, and the code that takes the rest. Pure."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedBatch:
    """Optimizer step in both trainers. Here a sequence may hold many samples.

    There it is one sample.
    """

    ranks: int
    sequences_per_step: int
    samples_per_sequence: float | None
    """Samples of a sequence, on average; None if sequences are packed and the dataset
    is not found."""
    tokens_per_step: float | None
    """Non-padding tokens of this trainer's optimizer step over all ranks."""
    per_device_batch_size: int
    gradient_accumulation_steps: int
    exported_samples_per_step: int
    exported_tokens_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Profile exported to another trainer."""

    written_for: str
    """Library and version whose names and meanings these are; a test loads the file
    with it."""
    model: str
    nodes: int
    ranks_per_node: int
    batch: ExportedBatch
    arguments: dict[str, Value]
    calls: tuple[str, ...]
    """Code for the calling program, which no argument can express."""
    settings: tuple[Equivalent, ...]
    warnings: tuple[str, ...]


def row(
    setting: str,
    argument: str | None = None,
    value: Value = None,
    *,
    near: str | bool = "",
    lost: str | bool = "",
) -> Equivalent:
    """Return one row of the table; a remark that is false is left out."""
    equivalence: Equivalence = "none" if lost else "near" if near else "same"
    remark = str(lost or near or "")
    return Equivalent(
        setting=setting,
        argument=argument,
        value=value,
        equivalence=equivalence,
        remark=remark,
    )


def file_arguments(settings: Iterable[Equivalent]) -> dict[str, Value]:
    """Return the arguments that the file of settings holds."""
    written = ((one.argument, one.value) for one in settings if one.value is not None)
    return {
        argument: value
        for argument, value in written
        if argument and "(" not in argument
    }


def written_calls(
    settings: Iterable[Equivalent], templates: Mapping[str, str]
) -> list[str]:
    """Return the lines of each template, by function, with its arguments for ``{}``.

    Without any, it is left out.
    """
    taken: dict[str, list[str]] = {}
    for one in settings:
        call, bracket, argument = (one.argument or "").rstrip(")").partition("(")
        if bracket and one.value is not None:
            taken.setdefault(call, []).append(
                f"{argument}={one.value!r}" if argument else repr(one.value)
            )
    used = {
        call: text
        for call, text in templates.items()
        if call in taken or "{}" not in text
    }
    return [
        line
        for call, text in used.items()
        for line in text.replace("{}", ", ".join(taken.get(call, []))).split("\n")
    ]
