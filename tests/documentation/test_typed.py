"""The commands of the README, the tutorial and the page about own data do what these pages say, typed in order."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from tests.documentation.blocks import ROOT, commands_of, named_in_prose
from tests.documentation.typed import SUBSTITUTIONS, substituted, typed

TINY = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 128}  # fmt: skip
OF_THE_MACHINE = re.compile(r"\d|^(CPU|cpu_model) |^Wait until the machine is quiet")
"""The page was written on a busy machine, and says so; a quiet one has nothing to wait for."""


@pytest.fixture
def directory(tmp_path):
    """Hold a small model of its own, as its config.json."""
    for name in ("tiny", "my-encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.parametrize("page", SUBSTITUTIONS)
def test_every_substitution_has_something_to_replace(page):
    commands = [*commands_of(ROOT / page), *named_in_prose(ROOT / page)]
    used = [substituted(page, command)[1] for command in commands]
    idle = set(range(len(SUBSTITUTIONS[page]))) - set().union(*used)
    assert [SUBSTITUTIONS[page][number] for number in sorted(idle)] == []


@pytest.mark.slow
@pytest.mark.system
def test_the_readme_does_what_it_says(directory):
    typed("README.md", directory)
    assert (directory / "demo" / "reports" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.system
def test_the_tutorial_does_what_it_says_and_prints_what_it_shows(tmp_path):
    """Lines of the page's output that hold no figure, and no name of the machine, are in the real one as well."""
    for command, done in typed("docs/tutorial.md", tmp_path):
        plain = done.out.replace("\033[1m", "").replace("\033[0m", "")
        real = {" ".join(line.split()) for line in plain.splitlines()}
        shown = (" ".join(line.split()) for line in command.prints)
        missing = [line for line in shown if line and not OF_THE_MACHINE.search(line) and line not in real]
        assert missing == [], f"{command.where} prints other lines than the page shows:\n{done.out}"


@pytest.mark.slow
@pytest.mark.system
def test_own_data_becomes_a_training(directory):
    (directory / "local").mkdir()
    lines = [f"unit {number % 7} started after {number * 37 % 101} ms with code {number % 5}" for number in range(1500)]
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.log").write_text("\n".join(lines))
    (directory / "events.jsonl").write_text("\n".join(json.dumps({"doc": {"body": f"{one} again"}}) for one in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), directory / "events.parquet")
    page = ROOT / "docs" / "own-data.md"
    of_each_kind = [one for one in named_in_prose(page) if "--out" in one.words]
    assert len(of_each_kind) == 4
    typed("docs/own-data.md", directory, [*of_each_kind, *commands_of(page)])
