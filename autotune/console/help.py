"""Help and usage errors.

``SECTIONS`` and ``GUIDES`` are the texts to edit if you add a command. ``Command`` and
``Group`` write the help: commands in the order of work, few options, and examples.
``usage_error`` translates the parser's errors, and names the nearest command, option or
choice.
"""

import difflib
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from autotune.errors import UsageError
from trainer.formats.documentation import documentation_path

SECTIONS: Mapping[str, str] = {
    "Start here": "doctor estimate data",
    "Tune": "tune probe workers network confirm baseline",
    "Review": "report compare profile advise",
    "Run": "plan train status",
}
_PROFILE = "profiles/bert-mini-cpu.toml"
GUIDES: Mapping[str, tuple[str, ...]] = {
    "": (
        "index.md",
        "estimate --model bert-120m --gpu h100-sxm-80gb",
        "data prepare text:corpus --out data",
        "tune --model bert-120m --data data",
    ),
    "doctor": ("install.md#on-a-gpu", ""),
    "estimate": ("how-it-works.md#memory", "--model bert-120m --gpu h100-sxm-80gb"),
    "data": ("data.md", "inspect data"),
    "data inspect": ("data.md#3-inspect-and-verify", "data --seq-length 512"),
    "data prepare": (
        "data.md#1-define-a-sample",
        "text:corpus --out data",
        "elf:/usr/bin --out data --max-tokens 512",
    ),
    "data verify": ("data.md#3-inspect-and-verify", "data"),
    "data stage": ("data.md#copy-to-local-disks", "data --to /tmp/data"),
    "tune": (
        "tune.md#phases",
        "--model bert-120m --data data",
        "--model bert-120m --data data --time-limit 30min --slurm",
        "--step my_module:build_step --loader my_module:build_loader",
    ),
    "probe": (
        "tune.md#run-one-phase-at-a-time",
        "--model bert-120m --data data",
        "--step my_module:build_step --memory 40GB",
    ),
    "workers": (
        "tune.md#run-one-phase-at-a-time",
        _PROFILE,
        "--loader my_module:build_loader --step-time 120ms",
    ),
    "confirm": ("tune.md#promised-and-delivered", _PROFILE, f"{_PROFILE} --window 30s"),
    "baseline": ("tune.md#run-one-phase-at-a-time", _PROFILE),
    "network": (
        "slurm.md#how-many-nodes-pay-off",
        f"{_PROFILE} --slurm",
        f"{_PROFILE} --predict --nodes 1,2,4",
    ),
    "report": ("reports.md#read-a-report", f"{_PROFILE} --run runs/first"),
    "advise": ("how-it-works.md#advice", "runs/first"),
    "compare": ("reports.md#compare", "runs/first runs/second --fail-if-slower 5%"),
    "profile": ("reports.md", f"show {_PROFILE}"),
    "profile verify": ("reports.md#verify-a-profile", _PROFILE),
    "profile show": (
        "reports.md#explain-a-setting",
        _PROFILE,
        f"{_PROFILE} data.num_workers",
    ),
    "status": ("train.md#checkpoints-and-resume", "runs/first"),
    "profile approve": ("reports.md#approve", f"{_PROFILE} --by NAME"),
    "profile export": (
        "plan.md#export-to-another-trainer",
        f"{_PROFILE} --to hf-trainer",
    ),
    "plan": (
        "plan.md#plan-a-run-before-you-pay-for-it",
        "--model bert-120m --gpu h100-sxm-80gb --tokens 10B",
        f"{_PROFILE} --steps 1000",
    ),
    "train": (
        "train.md#checkpoints-and-resume",
        f"{_PROFILE} --out runs/first",
        f"{_PROFILE} --nodes 4 --slurm",
    ),
}
"""Section of the documentation, and the arguments of examples, for each command."""
# Classes of click, of which typer has a private copy.
_Context = Any
_Parameter = Any

_MAX_COLUMNS = 100
"""Widest line of help."""
_MAX_NAME_COLUMNS = 26
"""Longest name that has its text on the same line; longer ones stand above it."""
_NAME_MARGIN_COLUMNS = 4
"""Columns around a name: two before it, and two between it and its text."""


class _HelpMixin:
    """Help of a command or a group."""

    params: list[_Parameter]

    def get_help_option_names(self: Any, ctx: _Context) -> list[str]:
        return [*ctx.help_option_names, "--help-all"]

    def get_short_help_str(self: Any, limit: int = 0) -> str:
        # Summaries are short enough; click would cut them to ``limit`` characters.
        summary = self.help.split("\n\n")[0]
        return " ".join(summary.split()).rstrip(".")

    def collect_usage_pieces(self: Any, ctx: _Context) -> list[str]:
        pieces = [
            _shown_name(parameter)
            for parameter in self.params
            if parameter.param_type_name == "argument"
        ]
        if isinstance(self, Group):
            pieces.append("COMMAND")
        return [*pieces, "[OPTIONS]"]

    def get_help(self: Any, ctx: _Context) -> str:
        path = ctx.command_path
        page, examples = _guide(path)
        advanced = [
            parameter
            for parameter in self.params
            if parameter.rich_help_panel == "Advanced"
        ]
        # The arguments of the whole command line are the root context's object.
        shows_all = "--help-all" in (ctx.find_root().obj or ())
        left_out = [] if shows_all else advanced
        shown = [
            parameter
            for parameter in self.params
            if not parameter.hidden and parameter not in left_out
        ]
        paragraphs = [
            *_description(self.help),
            self.get_usage(ctx),
            *_help_sections(self, ctx, shown),
        ]
        if left_out:
            paragraphs.append(f"More options: {path} --help-all")
        if examples:
            lines = [f"  {path} {example}".rstrip() for example in examples]
            paragraphs.append("\n".join(["Examples:", *lines]))
        paragraphs.append(f"Docs: {documentation_path(page)}")
        return "\n\n".join(paragraphs)


class Command(_HelpMixin, TyperCommand):
    """Command whose help shows its usual options.

    ``--help-all`` also shows the options of the panel ``Advanced``.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            # Errors name the bounds; help does not show them.
            parameter.min = None
            parameter.max = None
            is_option = parameter.param_type_name == "option"
            if parameter.metavar is None and is_option and not parameter.is_flag:
                parameter.metavar = _metavar(parameter)


class Group(_HelpMixin, TyperGroup):
    """Group that lists its commands in the order of work."""

    def parse_args(self, ctx: _Context, args: list[str]) -> list[str]:
        """Parse; without arguments, show help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: _Context, args: list[str]) -> Any:
        """Find the command.

        Raises:
            UsageError: If there is none; its next step names the most similar one.
        """
        name = args[0]
        if name in self.commands or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        nearest = _nearest(name, _visible_commands(self))
        if nearest is None:
            next_step = f"See: {ctx.command_path} -h"
        else:
            next_step = f"Did you mean {ctx.command_path} {nearest}?"
        raise UsageError(
            f"{ctx.command_path} has no command {name!r}", next_step=next_step
        )


def _guide(path: str) -> tuple[str, Sequence[str]]:
    """Return the page about a command, and the arguments of its examples."""
    _, _, command = path.partition(" ")
    page, *examples = GUIDES.get(command, ("index.md",))
    return page, examples


def _description(help_text: str) -> list[str]:
    """Return the paragraphs of a command's docstring, filled to the terminal."""
    return [
        textwrap.fill(" ".join(paragraph.split()), _width())
        for paragraph in help_text.split("\n\n")
    ]


def _help_sections(
    command: Any, ctx: _Context, parameters: Sequence[_Parameter]
) -> list[str]:
    """Return the sections on arguments, commands and options that have rows."""
    argument_rows = []
    option_rows = []
    for parameter in parameters:
        names, text = parameter.get_help_record(ctx)
        if parameter.param_type_name == "argument":
            text = text.replace("[required]", "")
            argument_rows.append((_shown_name(parameter), text))
        else:
            option_rows.append((names, text))
    option_rows.append(("-h, --help", "Show this help and exit."))
    commands = _visible_commands(command)
    names_by_title = {"Commands": list(commands)}
    if ctx.parent is None:
        names_by_title = {title: names.split() for title, names in SECTIONS.items()}
    rows_by_title = {"Arguments": argument_rows}
    for title, names in names_by_title.items():
        rows_by_title[title] = [
            (name, commands[name].get_short_help_str())
            for name in names
            if name in commands
        ]
    rows_by_title["Options"] = option_rows
    # All sections with commands have the same indent.
    min_name_columns = max(map(len, commands), default=0)
    return [
        _section(title, rows, min_name_columns)
        for title, rows in rows_by_title.items()
        if rows
    ]


def _visible_commands(command: Any) -> dict[str, Any]:
    """Return the commands of a group that help shows; none of a plain command."""
    commands = getattr(command, "commands", {})
    return {name: entry for name, entry in commands.items() if not entry.hidden}


def _section(title: str, rows: Sequence[tuple[str, str]], min_name_columns: int) -> str:
    """Return names with their texts, which are wrapped beside them."""
    longest = max(min_name_columns, *(len(name) for name, _ in rows))
    name_columns = min(longest, _MAX_NAME_COLUMNS)
    indent = name_columns + _NAME_MARGIN_COLUMNS
    lines = [f"{title}:"]
    for name, text in rows:
        wrapped = textwrap.wrap(text, _width() - indent, break_on_hyphens=False)
        first_line = wrapped[0] if wrapped else ""
        if len(name) <= name_columns:
            lines.append(f"  {name:<{indent - 2}}{first_line}".rstrip())
        else:
            lines.append(f"  {name}")
            lines.append(" " * indent + first_line)
        lines += [" " * indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, _MAX_COLUMNS)


def usage_error(error: TyperException, typed: Sequence[str]) -> UsageError:
    """Return an error of the parser in this program's form.

    Args:
        error: Error of the parser, whose kind shows in its attributes.
        typed: Command line, without the name of the program.
    """
    context = getattr(error, "ctx", None)
    if context is None:
        command = [word for word in typed[:1] if not word.startswith("-")]
        path = " ".join(["autotune", *command])
    else:
        path = context.command_path
    parameter = getattr(error, "param", None)
    option_name = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        return _unknown_option(path, option_name, error.possibilities)
    message = error.message.rstrip(".")
    see_help = f"See: {path} -h"
    if option_name is not None:
        problem = "requires a" if "requires" in message else "takes no"
        return UsageError(f"{option_name} {problem} value", next_step=see_help)
    if parameter is None:
        message = message.replace(
            "Got unexpected extra argument(s)", "unexpected arguments"
        )
        return UsageError(f"{path}: {message}", next_step=see_help)
    if hasattr(error, "param_type"):
        return _missing_parameter(path, parameter, typed)
    return _invalid_value(path, parameter, error)


def _unknown_option(
    path: str, option_name: str | None, possibilities: Sequence[str] | None
) -> UsageError:
    next_step = f"See: {path} -h"
    if possibilities:
        next_step = f"Did you mean {possibilities[0]}?"
    return UsageError(f"{path} has no option {option_name!r}", next_step=next_step)


def _missing_parameter(
    path: str, parameter: _Parameter, typed: Sequence[str]
) -> UsageError:
    """Return the error for a required parameter; its next step is an example.

    If more than the command was typed, the example adds the missing option to it.
    """
    _, examples = _guide(path)
    next_step = " ".join([path, *examples[:1]])
    has_arguments = len(typed) > path.count(" ")
    if parameter.param_type_name == "option" and has_arguments:
        choices = _choices(parameter)
        value = choices[0] if choices else parameter.metavar or parameter.name.upper()
        next_step = shlex.join(["autotune", *typed, _shown_name(parameter), value])
    return UsageError(f"{path} requires {_shown_name(parameter)}", next_step=next_step)


def _invalid_value(
    path: str, parameter: _Parameter, error: TyperException
) -> UsageError:
    """Return the error for a value; its next step names the most similar choice."""
    # Values are validated by pydantic, whose errors hold them.
    cause: Any = error.__cause__
    value = cause.errors()[0]["input"] if hasattr(cause, "errors") else ""
    reason = error.message.rstrip(".").removeprefix("Value error, ")
    reason = reason.replace("Input", "it")
    name = _shown_name(parameter)
    nearest = _nearest(str(value), _choices(parameter))
    next_step = f"See: {path} -h"
    if nearest is not None:
        next_step = f"Did you mean {name} {nearest}?"
    return UsageError(f"{name} {value!r}: {reason}", next_step=next_step)


def _nearest(word: str, possibilities: Iterable[str]) -> str | None:
    """Return the most similar word; None if none is similar."""
    matches = difflib.get_close_matches(word, list(possibilities), n=1)
    return matches[0] if matches else None


def _metavar(option: _Parameter) -> str:
    """Return the placeholder for an option's value: its choices, or its type."""
    choices = _choices(option)
    if choices:
        return "|".join(choices)
    type_name = option.display_type(None)  # such as <list[str]>
    if "int" in type_name or "float" in type_name:
        return "N"
    if "path" in type_name.lower():
        return "PATH"
    return "NAME"


def _choices(parameter: _Parameter) -> list[str]:
    """Return the values that a parameter accepts; empty if they are not listed."""
    return [
        str(getattr(choice, "value", choice))
        for choice in parameter.type_descriptor.choices or ()
    ]


def _shown_name(parameter: _Parameter) -> str:
    """Return a parameter's name as the help shows it.

    An argument has brackets if it is optional, and dots if it may be repeated.
    """
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    name = str(parameter.metavar or parameter.name.upper())
    if not parameter.required and not name.startswith("["):
        name = f"[{name}]"
    if parameter.nargs != 1 and not name.endswith("..."):
        name = f"{name}..."
    return name
