"""Every command and option, from the command line itself and the trainer's."""

import argparse
import enum
import inspect
import pathlib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from autotune.cli import app
from benchmarks.reference.markdown import code, table
from benchmarks.reference.units import unit_of
from trainer.__main__ import command_line as trainer_command_line

_INTRODUCTION = """\
# Commands

Written by `make figures` from the commands themselves. `autotune COMMAND --help` says the same in a terminal. Every
command that has `--json` prints one JSON document to standard output; progress and messages go to standard error. What
exit codes mean: [exit codes](exit-codes.md). A value that is a size takes `GB` (10⁹ bytes) or `GiB` (2³⁰).

"""
_TRAINER = """\
## The trainer

`python -m trainer`: {purpose} Under `torchrun` on many ranks. What it does and reports: [training](../training.md).

"""
_NAMED_OTHERWISE = {
    "trial_timeout": "s",
    "window": "s",
    "wait_seconds": "s",
    "seq_length": "tokens",
    "length": "tokens",
    "memory": "size",
    "bandwidth": "bits or bytes per s",
    "time": "`[D-]HH:MM:SS`",
    "price_per_gpu_hour": "any currency",
}
"""Units of options whose names do not end with one."""
_KINDS = {bool: "flag", int: "integer", float: "number", str: "text", pathlib.Path: "path"}
_HEADS = ("option", "value", "unit", "default", "meaning")


def page() -> str:
    """The page: what is hidden on the command line is left out."""
    groups = list(_commands(typer.main.get_command(app), ()))
    listed = [(f"[{code(name)}](#{_anchor(name)})", _first_sentence(_help_of(command))) for name, command in groups]
    listed.append(("[`python -m trainer`](#the-trainer)", "Train a masked-LM encoder."))
    text = _INTRODUCTION + table(("command", "does"), listed)
    for name, command in groups:
        text += f"\n## {name}\n\n{_help_of(command)}\n\n" + _options(command)
    return text + "\n" + _trainer()


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer's own type
    """Each command that can be run, with its whole name."""
    if command.hidden:
        return
    named = (*words, command.name)
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(named), command
        return
    for one in inner.values():
        yield from _commands(one, named)


def _options(command: Any) -> str:  # noqa: ANN401 - typer's own type
    kinds = typing.get_type_hints(inspect.unwrap(command.callback))
    rows = [_row(parameter, kinds[parameter.name]) for parameter in command.params if not parameter.hidden]
    return table(_HEADS, rows) if rows else "No options.\n"


def _row(parameter: Any, annotation: object) -> tuple[str, str, str, str, str]:  # noqa: ANN401 - typer's own type
    kind = _without_none(annotation)
    repeated = typing.get_origin(kind) in (list, tuple)
    one = typing.get_args(kind)[0] if repeated else kind
    argument = parameter.param_type_name == "argument"
    named = code((parameter.metavar or parameter.name).upper()) if argument else _spelling(parameter)
    value = _value(one, parameter.min, parameter.max) + ("; several" if repeated else "")
    meaning = parameter.help or ""
    if parameter.envvar:
        meaning += f" Else the environment's {code(parameter.envvar)}."
    return named, value, _unit(parameter.name, one), _default(parameter), meaning


def _spelling(parameter: Any) -> str:  # noqa: ANN401 - typer's own type
    forms = [*parameter.opts, *parameter.secondary_opts]
    metavar = f" {parameter.metavar}" if parameter.metavar else ""
    return " or ".join(code(f"{form}{metavar}") for form in forms)


def _value(kind: object, lowest: float | None, highest: float | None) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(sorted(code(choice) for choice in typing.get_args(kind)))  # else by who was imported first
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(code(choice.value) for choice in kind)
    name = _KINDS.get(kind, "text") if isinstance(kind, type) else "text"
    bounds = [] if lowest is None else [f"≥ {lowest:g}"]
    bounds += [] if highest is None else [f"≤ {highest:g}"]
    return " ".join((name, *bounds))


def _unit(name: str, kind: object) -> str:
    if name in _NAMED_OTHERWISE:
        return _NAMED_OTHERWISE[name]
    return (unit_of(name) or "") if kind in (int, float, str) else ""


def _default(parameter: Any) -> str:  # noqa: ANN401 - typer's own type
    if parameter.required:
        return "required"
    default = parameter.default
    if default is None or (isinstance(default, list | tuple) and not default):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return code(default)


def _without_none(annotation: object) -> Any:  # noqa: ANN401 - any type
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        left = [one for one in typing.get_args(annotation) if one is not type(None)]
        return left[0]
    return annotation


def _trainer() -> str:
    parser = trainer_command_line()
    rows = [_trainer_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return _TRAINER.format(purpose=parser.description) + table(_HEADS, rows)


def _trainer_row(action: argparse.Action) -> Sequence[str]:
    metavar = str(action.metavar or action.dest.upper())
    kind = _value(action.type or str, None, None)
    repeated = "; several" if isinstance(action.default, list) else ""
    default = "required" if action.required else code(action.default) if action.default else ""
    return code(f"{action.option_strings[0]} {metavar}"), kind + repeated, "", default, action.help or ""


def _help_of(command: Any) -> str:  # noqa: ANN401 - typer's own type
    return inspect.cleandoc(command.help or "")


def _first_sentence(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    return first.partition(". ")[0].removesuffix(".") + "."


def _anchor(heading: str) -> str:
    """As both code hosts and this site make one of a heading."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")
