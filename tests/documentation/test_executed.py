"""The commands of the README, the tutorial and the page about own data are typed in order, and do what they say."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.documentation.blocks import ROOT, Command, commands_of, named_in_prose
from tests.documentation.shell import Done, Shell
from tests.documentation.substitutions import SUBSTITUTIONS, substituted

pytestmark = [pytest.mark.slow, pytest.mark.system]

TINY = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 128}  # fmt: skip


def test_the_readme_does_what_it_says(tmp_path):
    _model(tmp_path / "tiny")
    _typed("README.md", tmp_path)
    assert (tmp_path / "demo" / "reports" / "report.html").is_file()


def test_the_tutorial_does_what_it_says(tmp_path):
    done = _typed("docs/tutorial.md", tmp_path)
    for command, one in done:
        _prints(command, one)


def test_own_data_becomes_a_training(tmp_path):
    _raw(tmp_path)
    _model(tmp_path / "my-encoder")
    (tmp_path / "local").mkdir()
    page = ROOT / "docs" / "own-data.md"
    of_each_kind = [one for one in named_in_prose(page) if "--out" in one.words]
    assert len(of_each_kind) == 4
    _typed("docs/own-data.md", tmp_path, [*of_each_kind, *commands_of(page)])


@pytest.mark.parametrize("page", SUBSTITUTIONS)
def test_every_substitution_has_something_to_replace(page):
    commands = [*commands_of(ROOT / page), *named_in_prose(ROOT / page)]
    used = [substituted(page, _text(command))[1] for command in commands]
    idle = set(range(len(SUBSTITUTIONS[page]))) - set().union(*used)
    assert [SUBSTITUTIONS[page][number].pattern for number in sorted(idle)] == []


def _typed(page: str, directory: Path, commands: Sequence[Command] | None = None) -> list[tuple[Command, Done]]:
    """Type the commands of a page; each must end with 0."""
    shell = Shell(directory)
    done = []
    for command in commands_of(ROOT / page) if commands is None else commands:
        text, _ = substituted(page, _text(command))
        if not text:
            continue
        one = shell.run(text)
        assert one.code == 0, f"{command.where}\nas: {text}\n{one.out[-2000:]}\n{one.said[-4000:]}"
        assert "Traceback" not in one.said
        done.append((command, one))
    return done


def _text(command: Command) -> str:
    """Without its comment, and with everything else as it was typed."""
    return command.text.partition("  #")[0].strip()


def _prints(command: Command, one: Done) -> None:
    """Lines of the page's output that hold no figure are in the real one as well."""
    real = {" ".join(line.split()) for line in _plain(one.out).splitlines()}
    shown = (" ".join(line.split()) for line in command.prints)
    missing = [line for line in shown if line and not any(c.isdigit() for c in line) and line not in real]
    assert missing == [], f"{command.where} prints other lines than the page shows:\n{one.out}"


def _plain(text: str) -> str:
    return text.replace("\033[1m", "").replace("\033[0m", "")


def _model(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))


def _raw(directory: Path) -> None:
    """A little of each kind of raw data that the page names."""
    lines = [f"unit {number % 7} started after {number * 37 % 101} ms with code {number % 5}" for number in range(1500)]
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.log").write_text("\n".join(lines))
    (directory / "events.jsonl").write_text("\n".join(json.dumps({"doc": {"body": f"{one} again"}}) for one in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), directory / "events.parquet")
