"""Help and usage errors: workflow order, few options, examples, and the new name of whatever was renamed."""

import difflib
import shlex
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from autotune.errors import UsageError

SECTIONS: Mapping[str, str] = {
    "Start here": "doctor estimate data",
    "Tune": "tune probe workers network baseline",
    "Review": "report compare profile advise",
    "Run": "plan train status",
}
_PROFILE = "profiles/bert-mini-cpu.toml"
GUIDES: Mapping[str, tuple[str, ...]] = {
    "": ("index.md", "estimate --model bert-120m --gpu h100-sxm-80gb", "data prepare text:corpus --out data",
         "tune --model bert-120m --data data"),
    "doctor": ("install.md", "", "--path /scratch"),
    "estimate": ("how-it-works.md", "--model bert-120m --gpu h100-sxm-80gb", "--model bert-mini --memory 24GiB"),
    "data": ("data.md", "prepare text:corpus --out data", "inspect data"),
    "data prepare": ("data.md", "text:corpus --out data", "elf:/usr/bin --out data --max-tokens 512"),
    "data inspect": ("data.md", "data --seq-length 512"),
    "data verify": ("data.md", "data"),
    "data stage": ("data.md", "data --to /tmp/data"),
    "tune": ("tune.md", "--model bert-120m --data data", "--model bert-120m --data data --time-limit 30min --slurm"),
    "probe": ("tune.md", "--model bert-120m --data data", "--model bert-mini --data data --memory 8GiB"),
    "workers": ("tune.md", _PROFILE, f"{_PROFILE} --step-time 120ms"),
    "network": ("tune.md", f"{_PROFILE} --slurm", f"{_PROFILE} --predict --nodes 1,2,4"),
    "baseline": ("tune.md", _PROFILE, f"{_PROFILE} --time-limit 10min"),
    "report": ("reports.md", _PROFILE, f"{_PROFILE} --run runs/first"),
    "compare": ("reports.md", "runs/first runs/second --fail-if-slower 5%"),
    "profile": ("reports.md", f"show {_PROFILE}", f"verify {_PROFILE}"),
    "profile show": ("reports.md", _PROFILE, f"{_PROFILE} data.num_workers"),
    "profile verify": ("reports.md", _PROFILE),
    "profile approve": ("reports.md", f"{_PROFILE} --by NAME"),
    "profile export": ("plan.md", f"{_PROFILE} --to hf-trainer"),
    "advise": ("reports.md", "runs/first", f"{_PROFILE} --apply"),
    "plan": ("plan.md", "--model bert-120m --gpu h100-sxm-80gb --tokens 10B", f"{_PROFILE} --steps 1000"),
    "train": ("train.md", f"{_PROFILE} --out runs/first", f"{_PROFILE} --nodes 4 --slurm"),
    "status": ("train.md", "", "runs/first"),
}  # fmt: skip
"""Page of the documentation, and the arguments of examples, for each command."""
_RENAMED: Mapping[str, str] = {
    "scale": "network --predict", "launch local": "train", "launch slurm": "train --slurm", "launch status": "status",
    "launch": "train", "explain": "profile show", "profile explain": "profile show", "review": "profile approve",
    "profile review": "profile approve", "report review": "profile approve", "profile diff": "compare",
    "report compare": "compare", "report build": "report", "export": "profile export", "stage": "data stage",
    "prepare": "data prepare", "inspect": "data inspect",
}  # fmt: skip
_RENAMED_OPTIONS: Mapping[str, tuple[str, str]] = {
    "--profile": ("", ""), "--minutes": ("--time-limit", "min"), "--time": ("--time-limit", ""),
    "--timeout-s": ("--timeout", "s"), "--row-tokens": ("--seq-length", ""), "--local-ranks": ("--ranks", ""),
    "--max-rows": ("--max-micro-batch-size", ""), "--rows": ("--max-micro-batch-size", ""), "--as-gpu": ("--gpu", ""),
    "--head": ("--mlm-head", ""), "--checkpointing": ("--activation-checkpointing", ""),
}  # fmt: skip
"""New name of each option, and the unit that its value requires now; without a name, the value is an argument."""
_REASONS = {
    "int_parsing": "is not a whole number", "float_parsing": "is not a number",
    "greater_than_equal": "is less than {ge}", "less_than_equal": "exceeds {le}",
}  # fmt: skip
Parameter = Any  # typer keeps its own copy of click private


class _Helped:
    def get_help_option_names(self: Any, ctx: typer.Context) -> list[str]:
        # In this order, not that of a set.
        return [*ctx.help_option_names, "--help-all"]

    def get_short_help_str(self: Any, limit: int = 0) -> str:
        # Never cut.
        return " ".join(self.help.split("\n\n")[0].split()).rstrip(".")

    def collect_usage_pieces(self: Any, ctx: typer.Context) -> list[str]:
        arguments = [_name(one) for one in self.params if one.param_type_name == "argument"]
        return [*arguments, *(["COMMAND"] if isinstance(self, Group) else []), "[OPTIONS]"]

    def get_help(self: Any, ctx: typer.Context) -> str:
        advanced = any(map(_is_advanced, self.params)) and "--help-all" not in (ctx.find_root().obj or ())
        path = ctx.command_path
        page, *examples = GUIDES.get(path.partition(" ")[2], GUIDES[""])
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for one in self.params:
            record = one.get_help_record(ctx)  # None if it is hidden
            if record is not None and not (advanced and _is_advanced(one)):
                rows[one.param_type_name].append(record)
        commands = getattr(self, "commands", {})
        told = {name: one.get_short_help_str() for name, one in commands.items() if not one.hidden}
        listed = SECTIONS if ctx.parent is None else {"Commands": " ".join(told)}
        sections = {
            "Arguments": [(name.partition(" <")[0], text.replace("[required]", "")) for name, text in rows["argument"]],
            **{head: [(name, told[name]) for name in names.split() if name in told] for head, names in listed.items()},
            "Options": [*rows["option"], ("-h, --help", "Show this help and exit.")],
        }
        paragraphs = [textwrap.fill(" ".join(one.split()), _width()) for one in self.help.split("\n\n")]
        more = [f"More options: {path} --help-all"] if advanced else []
        least = max(map(len, told), default=0)
        shown = [_section(head, lines, least) for head, lines in sections.items() if lines]
        typed = "\n".join(f"  {path} {one}".rstrip() for one in examples)
        return "\n\n".join(
            [*paragraphs, self.get_usage(ctx), *shown, *more, f"Examples:\n{typed}", f"Docs: docs/{page}"]
        )


class Command(_Helped, TyperCommand):
    """Command whose help shows its usual options; ``--help-all`` also shows those of the panel ``Advanced``."""

    def __init__(self, *given: Any, **settings: Any) -> None:  # noqa: ANN401 - typer's
        super().__init__(*given, **settings)
        for one in self.params:
            one.min = one.max = None  # errors tell the bounds
            if one.metavar is None and one.param_type_name == "option" and not one.is_flag:
                kind = one.display_type(None)  # such as <list[str]>
                word = "N" if "int" in kind or "float" in kind else "PATH" if "path" in kind.lower() else "NAME"
                one.metavar = "|".join(_choices(one)) or word


class Group(_Helped, TyperGroup):
    """Group that lists its commands in the order of work, and leads from old names to new ones."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # noqa: ANN401 - typer's
        """Find the command.

        Raises:
            UsageError: If there is none, with its new name or the most similar one.
        """
        words = [*ctx.command_path.split()[1:], *args]
        old = next((name for name in (" ".join(words[:2]), words[0]) if name in _RENAMED), None)
        if old is not None:
            new, flag, name = _RENAMED[old].partition(" --")  # a flag comes last: --slurm may take a value
            now = modern([*new.split(), *words[len(old.split()) :], *([f"--{name}"] if flag else [])])
            raise UsageError(f"{old!r} is now {_RENAMED[old]!r}", next_step=shlex.join(["autotune", *now]))
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(args[0], [name for name, one in self.commands.items() if not one.hidden], n=1)
        raise UsageError(
            f"{ctx.command_path} has no command {args[0]!r}",
            next_step=f"Did you mean {ctx.command_path} {near[0]}?" if near else f"See: {ctx.command_path} -h",
        )


def modern(words: Sequence[str], known: Collection[str] = ()) -> list[str]:
    """Return a command line with the new names of old options, except those in ``known``. Pure."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        old, equals, value = word.partition("=")
        if old not in _RENAMED_OPTIONS or old in known:
            found.append(word)
            continue
        new, unit = _RENAMED_OPTIONS[old]
        value = value if equals else next(rest, "")
        found += [*([new] if new else []), value + (unit if value[-1:].isdigit() else "")]
    return found


def usage_error(error: TyperException, typed: Sequence[str]) -> UsageError:
    """Return an error of the parser in this program's form."""
    context, one, option = (getattr(error, name, None) for name in ("ctx", "param", "option_name"))
    path = context.command_path if context else " ".join(["autotune", *(word for word in typed[:1] if word[0] != "-")])
    see = f"See: {path} -h"
    if hasattr(error, "possibilities"):  # of an option that does not exist
        now = modern(typed, [name for one in context.command.params for name in one.opts] if context else ())
        near = next(iter(error.possibilities or ()), None)
        step = shlex.join(["autotune", *now]) if now != list(typed) else f"Did you mean {near}?" if near else see
        return UsageError(f"{path} has no option {option!r}", next_step=step)
    if option is not None:
        return UsageError(
            f"{option} {'requires a' if 'requires' in error.message else 'takes no'} value", next_step=see
        )
    if one is None:
        said = error.message.rstrip(".").replace("Got unexpected extra argument(s)", "unexpected arguments")
        return UsageError(f"{path}: {said}", next_step=see)
    name = _name(one) if one.param_type_name == "argument" else one.opts[0]
    if hasattr(error, "param_type"):  # it is missing
        example = GUIDES.get(path.partition(" ")[2], ("", ""))[1]
        return UsageError(f"{path} requires {name}", next_step=f"{path} {example}" if example else see)
    found = error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else {"type": "", "input": ""}
    reason = _REASONS.get(found["type"], error.message).format(**found.get("ctx", {}))
    if choices := _choices(one):
        near = difflib.get_close_matches(str(found["input"]), choices, n=1)
        reason, see = f"is not one of: {', '.join(choices)}", f"Did you mean {name} {near[0]}?" if near else see
    return UsageError(f"{name} {str(found['input'])!r} {reason}", next_step=see)


def _is_advanced(one: Parameter) -> bool:
    return bool(one.rich_help_panel == "Advanced")


def _choices(one: Parameter) -> list[str]:
    return [str(getattr(choice, "value", choice)) for choice in one.type_descriptor.choices or ()]


def _name(one: Parameter) -> str:
    """Return an argument as usage lines show it: brackets if it is optional, dots if it may be repeated."""
    name = one.metavar or one.name.upper()
    name = name if one.required or name.startswith("[") else f"[{name}]"
    return name if one.nargs == 1 or name.endswith("...") else f"{name}..."


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _section(head: str, rows: Sequence[tuple[str, str]], least: int) -> str:
    indent = min(max(least, *(len(name) for name, _ in rows)), 26) + 4
    lines = [f"{head}:"]
    for name, text in rows:
        first, *rest = textwrap.wrap(text, _width() - indent, break_on_hyphens=False) or [""]
        fits = len(name) <= indent - 4
        lines += [f"  {name:<{indent - 2}}{first}".rstrip()] if fits else [f"  {name}", " " * indent + first]
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)
