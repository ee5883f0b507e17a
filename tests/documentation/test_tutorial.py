"""The commands of the tutorial are typed in order, and print what the page shows."""

import re

import pytest

from tests.documentation.blocks import Command
from tests.documentation.shell import Done
from tests.documentation.typed import typed

OF_THE_MACHINE = re.compile(r"\d|^(CPU|cpu_model) |^Wait until the machine is quiet")
"""The page was written on a busy machine, and says so; a quiet one has nothing to wait for."""
pytestmark = [pytest.mark.slow, pytest.mark.system]


def test_the_tutorial_does_what_it_says(tmp_path):
    for command, done in typed("docs/tutorial.md", tmp_path):
        _prints(command, done)


def _prints(command: Command, one: Done) -> None:
    """Lines of the page's output that hold no figure, and no name of the machine, are in the real one as well."""
    real = {" ".join(line.split()) for line in _plain(one.out).splitlines()}
    shown = (" ".join(line.split()) for line in command.prints)
    missing = [line for line in shown if line and not OF_THE_MACHINE.search(line) and line not in real]
    assert missing == [], f"{command.where} prints other lines than the page shows:\n{one.out}"


def _plain(text: str) -> str:
    return text.replace("\033[1m", "").replace("\033[0m", "")
