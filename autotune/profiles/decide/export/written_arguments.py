"""Arguments of an export as its file and its code have them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.profiles.decide.export.table import Equivalent, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallArgument:
    """Argument that only code can pass, as in ``AdamW(lr)``."""

    function: str
    keyword: str
    """Name of the argument; empty if it is positional, as in ``range()``."""


def _call_argument(argument: str) -> _CallArgument | None:
    """Return the parts of ``function(argument)``; None for an argument of the file."""
    function, bracket, keyword = argument.removesuffix(")").partition("(")
    if not bracket:
        return None
    return _CallArgument(function=function, keyword=keyword)


def file_arguments(settings: Iterable[Equivalent]) -> dict[str, Value]:
    """Return the arguments that the file of settings holds."""
    arguments: dict[str, Value] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        if _call_argument(setting.argument) is None:
            arguments[setting.argument] = setting.value
    return arguments


def written_calls(
    settings: Iterable[Equivalent], templates: Mapping[str, str]
) -> list[str]:
    """Return the lines of code that pass the arguments which the file cannot hold.

    Args:
        settings: Settings of the export.
        templates: Code by function, with ``{}`` in place of its arguments; code that
            has this place is left out if there are no arguments for it.
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
    """Return the arguments of each function, as code: ``lr=0.001``."""
    arguments: dict[str, list[str]] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        call_argument = _call_argument(setting.argument)
        if call_argument is None:
            continue
        code = repr(setting.value)
        if call_argument.keyword:
            code = f"{call_argument.keyword}={code}"
        arguments.setdefault(call_argument.function, []).append(code)
    return arguments
