"""Subjects from the options of a command."""

import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import UsageError
from autotune.subjects.registry import subject_class
from autotune.subjects.subject import MICRO_BATCH_SIZE, Argument, Subject

if TYPE_CHECKING:
    from autotune.console.options import OwnOptions

_FUNCTION = re.compile(r"(?:[\w.]+|.+\.py):[A-Za-z_][\w.]*")
"""``module:function`` or ``path/of/script.py:function``."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]\w*)")
"""A number and the plural of a unit."""


def requested_subjects(
    options: "OwnOptions",
    *,
    loader: str | None = None,
    vary: Sequence[str] = (),
) -> list[Subject]:
    """Return the subject with each combination of the arguments.

    Args:
        options: Options that name your functions.
        loader: Name of the function that builds a loader; None if there is none.
        vary: Values of arguments that may be varied, as ``NAME=V1,V2``.

    Raises:
        UsageError: If a function or an argument is malformed.
        BadInput: If there is no such kind of subject.
    """
    for name in (options.step, loader):
        if name is not None and not _FUNCTION.fullmatch(name):
            raise UsageError(
                f"{name!r} does not name a function",
                next_step=(
                    "Write module:function, such as my_module:build_step, or"
                    " path/of/script.py:function"
                ),
            )
    values = _values("--set", options.arguments or (), example="seq_length=512")
    varied = _values("--vary", vary, example="activation_checkpointing=false,true")
    for name, several in varied.items():
        if name in values:
            raise UsageError(
                f"--vary {name} cannot be used with --set {name}",
                next_step="Omit one: the first value of --vary is the present one.",
            )
        if len(set(several)) < 2:
            raise UsageError(
                f"--vary {name} has one value",
                next_step=f"Add others: --vary {name}={several[0]},OTHER",
            )
    subject_type = subject_class(options.subject)
    table = {
        "step_function": options.step,
        "loader_function": loader,
        "along": options.along or MICRO_BATCH_SIZE,
        **_units(options.per_size),
        **({"varied": varied} if varied else {}),
    }
    return [
        subject_type.from_table(
            {**table, "arguments": dict(zip(values, chosen, strict=True))}
        )
        for chosen in itertools.product(*values.values())
    ]


def assignments(option: str, given: Sequence[str]) -> dict[str, Argument]:
    """Return the values that an option such as ``--untuned`` gives to names.

    Raises:
        UsageError: If one is malformed, or names several values.
    """
    values = _values(option, given, example="micro_batch_size=8")
    for name, several in values.items():
        if len(several) > 1:
            raise UsageError(
                f"{option} {name} has {len(several)} values",
                next_step=f"Write {option} {name}={several[0]}",
            )
    return {name: value for name, (value,) in values.items()}


def _values(
    option: str, assignments: Sequence[str], *, example: str
) -> dict[str, list[Argument]]:
    """Return the values of arguments that an option names, as ``NAME=V1,V2``.

    Raises:
        UsageError: If one is malformed.
    """
    values: dict[str, list[Argument]] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier() or not text:
            raise UsageError(
                f"{option} {assignment!r} is not NAME=VALUE",
                next_step=f"Write {option} {example}",
            )
        values[name] = [_scalar(word) for word in text.split(",")]
    return values


def _units(per_size: str | None) -> dict[str, Any]:
    """Return the unit of throughput that ``--per-size`` names; empty without it.

    Raises:
        UsageError: If it is no amount.
    """
    if per_size is None:
        return {}
    amount = _AMOUNT.fullmatch(per_size.strip())
    if amount is None:
        raise UsageError(
            f"--per-size {per_size!r} is no amount",
            next_step="Write a number and a unit: --per-size 512tokens",
        )
    return {"units_per_size": float(amount[1]), "unit": amount[2]}


def _scalar(text: str) -> Argument:
    """Return a number or a truth value that a text spells, or else the text itself."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, bool | int | float):
            return value
    return text
