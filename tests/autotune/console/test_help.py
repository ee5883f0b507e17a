"""Help, examples and usage errors."""

import itertools
import operator
import re
import shlex
import subprocess
import sys

import pytest
import typer

from autotune.cli import application
from autotune.console.arguments import plain_arguments
from autotune.console.commands import COMMANDS as COMMAND_TABLE
from autotune.console.help import GUIDES, SECTIONS
from autotune.subjects import bench
from tests.documentation.blocks import ROOT
from trainer.command_line import build_parser

SUMMARY_CHARACTERS = 50
SHOWN_OPTIONS = 14


def _every(command, *path):
    if not command.hidden:
        yield path, command
        for name, subcommand in getattr(command, "commands", {}).items():
            yield from _every(subcommand, *path, name)


COMMANDS = dict(_every(typer.main.get_command(application())))
LEAVES = [
    path for path, command in COMMANDS.items() if not getattr(command, "commands", None)
]


def test_every_command_has_section_with_guide():
    assert sorted(" ".join(SECTIONS.values()).split()) == sorted(
        path[0] for path in COMMANDS if len(path) == 1
    )
    assert set(GUIDES) == {" ".join(path) for path in COMMANDS}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_with_example(says, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    text = says(*path, "-h")
    assert text == says(*path, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert f"\nExamples:\n  autotune {' '.join(path)}".rstrip() in text
    assert re.search(r"\nDocs: docs/[a-z-]+\.md(#[a-z0-9-]+)?\n$", text)
    assert not re.search(r"<[a-z]|\d<=x|x>=", text)  # no types of Python
    for name, command in getattr(COMMANDS[path], "commands", {}).items():
        if not command.hidden:
            summary = command.get_short_help_str()
            assert 0 < len(summary) <= SUMMARY_CHARACTERS
            assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_short_help_names_the_full_one(says, path):
    short = says(*path, "-h")
    long = says(*path, "--help-all")
    shown = re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)
    assert len(shown) <= SHOWN_OPTIONS
    every = [
        option
        for parameter in COMMANDS[path].params
        if parameter.param_type_name == "option"
        for option in parameter.opts
    ]
    assert re.findall(r"^  (--[a-z-]+)", long, re.MULTILINE) == every
    assert (f"More options: autotune {' '.join(path)} --help-all" in short) == (
        shown != every
    )


def _examples():
    for path, (_, *examples) in GUIDES.items():
        for example in examples:
            words = shlex.split(f"{path} {example}")
            yield next(words[:n] for n in (2, 1) if tuple(words[:n]) in COMMANDS), words


@pytest.mark.parametrize(("path", "words"), list(_examples()), ids=" ".join)
def test_example_is_valid_for_its_parser(path, words):
    COMMANDS[tuple(path)].make_context(
        "example", list(plain_arguments(words[len(path) :]))
    )


def test_linked_pages_exist():
    sources = [*(ROOT / "autotune").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]
    texts = [path.read_text() for path in sources]
    anchors = set(
        itertools.chain(
            *(re.findall(r"\bdocs ?= ?\"([a-z-]+)\"", text) for text in texts)
        )
    )
    assert anchors <= _anchors("faq.md")
    sections = [page.partition("#") for page, *_ in GUIDES.values()]
    assert [
        (page, anchor)
        for page, _, anchor in sections
        if anchor and anchor not in _anchors(page)
    ] == []
    assert [page for page, *_ in sections if not (ROOT / "docs" / page).is_file()] == []


def _anchors(page):
    headings = re.findall(
        r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in headings
    }


def test_prints_version(says):
    assert re.fullmatch(r"autotune \d+\.\d+\.\d+\n", says("--version"))


def test_hidden_commands_have_no_examples(says):
    assert "Examples" not in says("job", "-h") + says(
        "tune-between-nodes", "-h"
    ) + says("job", "meet", "-h")


@pytest.mark.parametrize(
    "words",
    [[], ["p.toml", "--no-such"], ["p.toml", "--resume"]],
)
def test_trainer_answers_in_the_same_form(words, capsys):
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(words)
    assert stop.value.code == 2
    assert re.fullmatch(
        r"error: .+\n  next: .+python -m trainer.*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("estimate --model bert-mini --memory 94", 2),
        ("estimate --model bert-mini --memory 2GiB --gpu h101", 3),
        ("probe --model bert-mini --data nowhere --here", 3),
        ("probe --model bert-mini --data d --memory 900 --here", 2),
        ("tune --model bert-mini --data nowhere --here", 3),
        ("tune --model bert-mini --data d --seq-length 1 --here", 2),
        ("plan p.toml --tokens 2X", 2),
        ("plan --model bert-mini --steps 3", 2),
        ("train p.toml --data nowhere", 3),
        ("train p.toml --nodes 2", 2),
    ],
)
def test_rejects_wrong_argument_before_loading_torch(
    workdir, says, monkeypatch, line, code
):
    def load(**_):
        raise AssertionError("torch is loaded")

    monkeypatch.setattr(bench, "ForkServerMachine", load)
    assert "\n  next: " in says(*line.split(), code=code)


@pytest.mark.parametrize("entry", COMMAND_TABLE, ids=operator.attrgetter("name"))
def test_table_has_the_summary_of_help(entry):
    registered = typer.main.get_command(application()).commands[entry.name]
    assert registered.help.partition("\n")[0] == entry.summary


def test_help_imports_no_command():
    code = (
        "import sys\nfrom autotune.cli import run\nrun(['-h'])\n"
        "loaded = {'pydantic', 'numpy', 'autotune.memory'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
