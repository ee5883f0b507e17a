"""Every command that the documentation names is valid for its program's parser."""

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import re
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from autotune.cli import application
from autotune.console.arguments import plain_arguments
from autotune.errors import UsageError
from tests.documentation.blocks import (
    ELLIPSIS,
    PAGES,
    ROOT,
    Command,
    commands_of,
    named_in_prose,
)
from trainer.command_line import build_parser as build_trainer_parser

OTHERS = frozenset(
    {
        ".",
        "cat",
        "cd",
        "export",
        "mkdir",
        "optuna-dashboard",
        "rsync",
        "scp",
        "sed",
        "tar",
        "tensorboard",
    }
)
"""Programs that are not this project's; a line that begins with none of these and none
of ours is a mistake."""


class Wrong(Exception):
    """A line that would not work as it stands."""


def check(command: Command) -> None:
    """Parse a command.

    Raises:
        Wrong: If the program is unknown, or does not take these words.
    """
    elided = ELLIPSIS in command.words
    try:
        _check(command.words, elided=elided)
    except Wrong:
        if not elided:
            raise
        # It stood for several, or for none.
        _check([word for word in command.words if word != ELLIPSIS], elided=True)


def check_named(command: Command) -> None:
    """Check that a command in prose exists and has its options.

    Arguments may be left out.
    """
    if command.words[1].isupper():  # autotune COMMAND
        return
    leaf, _, words = _leaf(command.words[1:])
    known = {
        option
        for parameter in leaf.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for word in words:
        option = word.partition("=")[0].rstrip(".,;:")
        if option.startswith("--") and option not in known:
            raise Wrong(f"{leaf.name} has no option {option}")


def _check(words: list[str], *, elided: bool) -> None:
    # Variables, before a program.
    words = [*itertools.dropwhile(re.compile(r"[A-Z_]+=").match, words)]
    program = words[0].rpartition("/")[2]
    rest = words[1:]
    if program == "autotune":
        _check_autotune(rest, elided=elided)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        launch = _parsed(get_args_parser(), rest)
        if (launch.module, launch.training_script) != (True, "trainer"):
            raise Wrong("torchrun is to start -m trainer")
        _parsed(build_trainer_parser(), launch.training_script_args)
    elif program in ("python", "python3"):
        _check_module(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in rest:
            if (
                "=" not in target
                and re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) is None
            ):
                raise Wrong(f"the Makefile has no target {target}")
    elif program == "ssh":
        _check(rest[1:], elided=elided)
    elif program == "srun":  # each of its options in one word
        _check(
            [*itertools.dropwhile(lambda word: word.startswith("--"), rest)],
            elided=elided,
        )
    elif program == "sh":
        if not (ROOT / rest[0]).is_file():
            raise Wrong(f"there is no {rest[0]}")
    elif program not in OTHERS:
        raise Wrong(
            f"{program} is no program that the documentation may name: see OTHERS in"
            f" {__file__}"
        )


def _check_autotune(words: list[str], *, elided: bool) -> None:
    leaf, path, rest = _leaf(list(plain_arguments(words)))
    if rest == ["--help"]:
        return
    if getattr(leaf, "commands", None) is not None:
        raise Wrong(f"{path} needs a command behind it")
    try:
        leaf.make_context(path, rest)
    except (TyperException, UsageError) as error:
        message = (
            error.format_message() if hasattr(error, "format_message") else str(error)
        )
        if not (elided and type(error).__name__ == "MissingParameter"):
            raise Wrong(f"{path}: {message}") from error


def _leaf(words: list[str]) -> tuple[Any, str, list[str]]:
    """Return the command that the words lead to, its whole name, and the words left."""
    command = root()
    path = "autotune"
    while (
        words
        and not words[0].startswith("-")
        and getattr(command, "commands", None) is not None
    ):
        name, *words = words
        if name not in command.commands:
            raise Wrong(f"{path} has no command {name}")
        command = command.commands[name]
        path = f"{path} {name}"
    return command, path, words


@functools.cache
def root() -> Any:
    return typer.main.get_command(application())


def _check_module(words: list[str]) -> None:
    if words[0] != "-m":
        raise Wrong(f"python {words[0]}: only modules are named")
    module = words[1]
    rest = words[2:]
    if module == "trainer":
        _parsed(build_trainer_parser(), rest)
    elif module == "autotune":
        _check_autotune(rest, elided=False)
    elif module not in ("pip", "venv") and importlib.util.find_spec(module) is None:
        raise Wrong(f"there is no module {module}")


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return parser.parse_args(words)
    except SystemExit as stop:
        raise Wrong(stderr.getvalue()) from stop


COMMANDS = [command for page in PAGES for command in commands_of(page)]
NAMED = [command for page in PAGES for command in named_in_prose(page, root().commands)]


@pytest.mark.parametrize(
    ("look", "commands", "least"),
    [(check, COMMANDS, 80), (check_named, NAMED, 40)],
    ids=["blocks", "prose"],
)
def test_every_command_has_its_options(look, commands, least):
    assert len(commands) > least
    wrong = []
    for command in commands:
        try:
            look(command)
        except (Wrong, ValueError) as error:  # ValueError: open quotes
            wrong.append(f"{command.where}\n    {error}")
    assert wrong == []


def typed(text: str) -> Command:
    return Command(page=ROOT / "README.md", line=1, text=text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("autotune prob --model bert-mini", "has no command prob"),
        ("autotune probe --modle bert-mini --data d", "No such option: --modle"),
        ("autotune estimate", "Missing option .--model"),
        (
            "autotune probe --model m --data d --max-micro-batch-size many",
            "--max-micro-batch-size",
        ),
        ("autotune data", "needs a command behind it"),
        ("autotune data inspect a b", "unexpected extra argument"),
        ("python -m trainer P --dat d --zzz", "zzz"),
        ("python -m benchmarks.nothing", "no module"),
        ("torchrun --nproc-per-node 2 -m trainer --data d", "required"),
        ("torchrun --no-such-option -m trainer P", "no-such-option"),
        ("make nothing", "no target nothing"),
        ("ssh host autotune data verfy d", "has no command verfy"),
        ("fetch everything", "is no program"),
    ],
)
def test_wrong_command_is_found(text, why):
    with pytest.raises(Wrong, match=why):
        check(typed(text))


def test_ellipsis_is_no_mistake():
    check(typed("autotune probe --model bert-120m … --seq-length 128"))
    check(typed("autotune profile show P [KEY]"))


def test_prose_names_only_existing_options():
    with pytest.raises(Wrong, match="no option --modle"):
        check_named(typed("autotune probe --modle bert-mini"))


def test_reads_blocks_as_people_do(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text `autotune doctor --json` more\n\n```sh\n# said\nautotune doctor   #"
        ' why\ne="autotune estimate"\n$e --model m \\\n  --device cpu\n```\n\n```\n$'
        " autotune doctor\nHost\n$ make test\n```\n\n```toml\na = 1\n```\n"
    )
    assert [
        (command.line, " ".join(command.words), command.prints)
        for command in commands_of(page)
    ] == [
        (5, "autotune doctor", ()),
        (7, "autotune estimate --model m --device cpu", ()),
        (12, "autotune doctor", ("Host",)),
        (14, "make test", ()),
    ]
    assert [command.text for command in named_in_prose(page)] == [
        "autotune doctor --json"
    ]
