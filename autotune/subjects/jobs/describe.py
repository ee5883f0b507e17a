"""Hash of a function that only this process has.

It covers the function's code and the values that it takes from around.
"""

import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.subjects.jobs.load import is_own

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_PARTS = 10_000
"""Most values that are told, and most elements of a list: a function may use all of a
dataset."""


def described_sha256(function: object) -> str:
    """Return a hash of a function that is the same in every process.

    It differs only if the code or a value that the function uses differs.
    """
    return hashlib.sha256(_told(function, {}).encode()).hexdigest()


def _told(value: Any, seen: dict[int, object]) -> str:
    """Return a value in words; what ``seen`` has by address was told before."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if id(value) in seen or len(seen) > _MOST_PARTS:
        return str(name)
    seen[id(value)] = value
    return f"{name}({', '.join(_told(part, seen) for part in _parts(value))})"


def _parts(value: Any) -> list[Any]:
    """Return the values that a value consists of."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return [len(value), *value[:_MOST_PARTS]]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        return _parts_of_source(value)
    kind: Any = type(value)
    if kind.__repr__ is object.__repr__:
        return [kind, getattr(value, "__dict__", {})]
    return [_ADDRESS.sub("", repr(value))]


def _parts_of_source(
    value: Any,
) -> list[Any]:
    """Return the parts of source of yours.

    Installed source counts by its name alone.
    """
    module = (
        value
        if isinstance(value, types.ModuleType)
        else sys.modules.get(value.__module__ or "")
    )
    file = getattr(module, "__file__", None)
    yours = getattr(module, "__name__", "__main__") == "__main__" or (
        file is not None and is_own(Path(file))
    )
    if not yours:
        return [getattr(value, "__module__", ""), getattr(value, "__name__", "")]
    if isinstance(value, types.FunctionType):
        around = inspect.getclosurevars(value)
        used = {**around.globals, **around.nonlocals}
        return [
            value.__code__,
            value.__defaults__,
            value.__kwdefaults__,
            dict(sorted(used.items())),
        ]
    if isinstance(value, type):
        members = {
            name: one
            for name, one in vars(value).items()
            if isinstance(one, types.FunctionType | int | str)
        }
        return [*value.__bases__, members]
    return [Path(file).read_bytes() if file and Path(file).is_file() else ""]
