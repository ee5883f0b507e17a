"""Help and usage errors.

Commands are listed in the order of work, with few options and with examples. A usage
error names the nearest command, option or choice.
"""

import difflib
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
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
_Typer = Any  # classes of click, of which typer has a private copy


class _Helped:
    params: list[_Typer]

    def get_help_option_names(self: _Typer, ctx: _Typer) -> list[str]:
        return [*ctx.help_option_names, "--help-all"]

    def get_short_help_str(self: _Typer, limit: int = 0) -> str:
        return " ".join(self.help.split("\n\n")[0].split()).rstrip(".")  # never cut

    def collect_usage_pieces(self: _Typer, ctx: _Typer) -> list[str]:
        arguments = [
            _name(one) for one in self.params if one.param_type_name == "argument"
        ]
        return [
            *arguments,
            *(["COMMAND"] if isinstance(self, Group) else []),
            "[OPTIONS]",
        ]

    def get_help(self: _Typer, ctx: _Typer) -> str:
        path = ctx.command_path
        page, *examples = GUIDES.get(path.partition(" ")[2], ("index.md",))
        advanced = [one for one in self.params if one.rich_help_panel == "Advanced"]
        left_out = [] if "--help-all" in (ctx.find_root().obj or ()) else advanced
        shown = [
            (one, one.get_help_record(ctx))
            for one in self.params
            if not one.hidden and one not in left_out
        ]
        arguments = [
            (_name(one), record[1])
            for one, record in shown
            if one.param_type_name == "argument"
        ]
        options = [record for one, record in shown if one.param_type_name == "option"]
        commands = {
            name: one
            for name, one in getattr(self, "commands", {}).items()
            if not one.hidden
        }
        listed = SECTIONS if ctx.parent is None else {"Commands": " ".join(commands)}
        sections = {
            "Arguments": [
                (name, text.replace("[required]", "")) for name, text in arguments
            ]
        }
        for head, names in listed.items():
            sections[head] = [
                (name, commands[name].get_short_help_str())
                for name in names.split()
                if name in commands
            ]
        sections["Options"] = [*options, ("-h, --help", "Show this help and exit.")]
        least = max(map(len, commands), default=0)
        paragraphs = [
            *(
                textwrap.fill(" ".join(one.split()), _width())
                for one in self.help.split("\n\n")
            ),
            self.get_usage(ctx),
            *(_section(head, rows, least) for head, rows in sections.items() if rows),
            *([f"More options: {path} --help-all"] if left_out else []),
            *(
                [
                    "\n".join(
                        ["Examples:", *(f"  {path} {one}".rstrip() for one in examples)]
                    )
                ]
                if examples
                else []
            ),
            f"Docs: {documentation_path(page)}",
        ]
        return "\n\n".join(paragraphs)


class Command(_Helped, TyperCommand):
    """Command whose help shows its usual options.

    ``--help-all`` also shows the options of the panel ``Advanced``.
    """

    def __init__(self, *given: _Typer, **settings: _Typer) -> None:
        super().__init__(*given, **settings)
        for one in self.params:
            one.min = one.max = None  # errors tell the bounds
            if (
                one.metavar is None
                and one.param_type_name == "option"
                and not one.is_flag
            ):
                kind = one.display_type(None)  # such as <list[str]>
                word = (
                    "N"
                    if "int" in kind or "float" in kind
                    else "PATH"
                    if "path" in kind.lower()
                    else "NAME"
                )
                one.metavar = "|".join(_choices(one)) or word


class Group(_Helped, TyperGroup):
    """Group that lists its commands in the order of work."""

    def parse_args(self, ctx: _Typer, args: list[str]) -> list[str]:
        """Parse; without arguments, show help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: _Typer, args: list[str]) -> _Typer:
        """Find the command.

        Raises:
            UsageError: If there is none; its next step names the most similar one.
        """
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(
            args[0],
            [name for name, one in self.commands.items() if not one.hidden],
            n=1,
        )
        step = (
            f"Did you mean {ctx.command_path} {near[0]}?"
            if near
            else f"See: {ctx.command_path} -h"
        )
        raise UsageError(
            f"{ctx.command_path} has no command {args[0]!r}", next_step=step
        )


def usage_error(error: TyperException, typed: Sequence[str]) -> UsageError:
    """Return an error of the parser in this program's form."""
    context, one, option = (
        getattr(error, name, None) for name in ("ctx", "param", "option_name")
    )
    path = (
        context.command_path
        if context
        else " ".join(["autotune", *(word for word in typed[:1] if word[0] != "-")])
    )
    step, said = f"See: {path} -h", error.message.rstrip(".")
    if hasattr(error, "possibilities"):  # of an option that does not exist
        near = next(iter(error.possibilities or ()), None)
        step = f"Did you mean {near}?" if near else step
        said = f"{path} has no option {option!r}"
    elif option is not None:
        said = f"{option} {'requires a' if 'requires' in said else 'takes no'} value"
    elif one is None:
        said = said.replace("Got unexpected extra argument(s)", "unexpected arguments")
        said = f"{path}: {said}"
    elif hasattr(error, "param_type"):  # it is missing
        said = f"{path} requires {_name(one)}"
        step = " ".join([path, *GUIDES.get(path.partition(" ")[2], ("",))[1:2]])
        if one.param_type_name == "option" and len(typed) > path.count(" "):
            value = next(iter(_choices(one)), one.metavar or one.name.upper())
            step = shlex.join(["autotune", *typed, _name(one), value])
    else:
        cause: _Typer = error.__cause__
        value = cause.errors()[0]["input"] if hasattr(cause, "errors") else ""
        near = next(
            iter(difflib.get_close_matches(str(value), _choices(one), n=1)), None
        )
        said = (
            f"{_name(one)} {value!r}:"
            f" {said.removeprefix('Value error, ').replace('Input', 'it')}"
        )
        step = f"Did you mean {_name(one)} {near}?" if near else step
    return UsageError(said, next_step=step)


def _choices(one: _Typer) -> list[str]:
    return [
        str(getattr(choice, "value", choice))
        for choice in one.type_descriptor.choices or ()
    ]


def _name(one: _Typer) -> str:
    """Return an option's name as the help shows it.

    An argument has brackets if it is optional, and dots if it may be repeated.
    """
    if one.param_type_name == "option":
        return str(one.opts[0])
    name = one.metavar or one.name.upper()
    name = name if one.required or name.startswith("[") else f"[{name}]"
    return name if one.nargs == 1 or name.endswith("...") else f"{name}..."


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _section(head: str, rows: Sequence[tuple[str, str]], least: int) -> str:
    indent = min(max(least, *(len(name) for name, _ in rows)), 26) + 4
    lines = [f"{head}:"]
    for name, text in rows:
        first, *rest = textwrap.wrap(
            text, _width() - indent, break_on_hyphens=False
        ) or [""]
        fits = len(name) <= indent - 4
        lines += (
            [f"  {name:<{indent - 2}}{first}".rstrip()]
            if fits
            else [f"  {name}", " " * indent + first]
        )
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)
