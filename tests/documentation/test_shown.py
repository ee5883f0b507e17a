"""Outputs that pages show agree with the commands, or with the committed files.

Outputs of a newcomer's machine are compared in ``test_quickstart``, by their form.
"""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from autotune.base.render_console import console_text
from autotune.base.units import parse_bytes
from autotune.profiles.store import read_profile
from autotune.report.sections import summary_table
from tests.documentation.blocks import ELLIPSIS, PAGES, ROOT, commands_of
from tests.documentation.outputs import words_of

SHIPPED = ROOT / "profiles" / "bert-mini-cpu.toml"
QUICKSTART = ROOT / "docs" / "quickstart.md"
PLAN = ROOT / "docs" / "plan.md"
SHOWN = [
    command
    for page in PAGES
    for command in commands_of(page)
    if command.text.startswith("autotune profile show profiles/") and command.prints
]
"""Commands on profiles that are committed, with their output."""


def output_of(words: list[str]) -> str:
    """Return what a command prints in the checkout."""
    process = subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return process.stdout


@pytest.mark.parametrize("command", SHOWN, ids=lambda command: command.where)
def test_profile_explains_itself_as_shown(command):
    assert (ROOT / command.words[3]).is_file()
    printed = output_of(command.words[1:]).splitlines()
    shown = [line for line in command.prints if line.strip() and line != ELLIPSIS]
    assert [line for line in shown if line not in printed] == []


def test_pages_show_explained_settings():
    assert {command.page.name for command in SHOWN} >= {"quickstart.md", "reports.md"}


def test_quickstart_shows_the_shipped_profile():
    profile = read_profile(SHIPPED).profile
    table = console_text((summary_table([profile]),))
    page = [words_of(line) for line in QUICKSTART.read_text().splitlines()]
    for line in table.splitlines():
        assert words_of(line) in page


def test_peak_of_own_code_is_within_its_budget():
    text = (ROOT / "docs" / "your-code.md").read_text()
    (budget,) = re.findall(r"autotune probe --step \S+ --memory (\w+)", text)
    (peak,) = re.findall(
        r"^my_module:build_step .*  (\d+ [KMG]iB) ", text, re.MULTILINE
    )
    # The largest step that fits nearly fills the budget; the page rounds its peak.
    share = parse_bytes(peak.replace(" ", "")) / parse_bytes(budget)
    assert 0.9 < share < 1.001


@pytest.fixture(scope="module")
def printed_plan() -> list[str]:
    """Return what the command prints that docs/plan.md shows, line by line."""
    (command,) = (
        command for command in commands_of(PLAN) if "--nodes 128" in command.text
    )
    return output_of(command.words[1:]).splitlines()


@pytest.mark.slow
def test_plan_prints_the_table_of_its_page(printed_plan):
    pinned = re.search(
        r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    if pinned is None or not importlib.metadata.version("torch").startswith(pinned[1]):
        pytest.skip("the page was written with the torch of constraints.txt")
    printed = [words_of(line) for line in printed_plan]
    _, _, after = PLAN.read_text().partition("| nodes | efficiency | tokens/s |")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in after.partition("\n\n")[0].splitlines()[2:]
    ]
    assert [row[0] for row in rows] == ["1", "64", "128"]
    *fewer_nodes, all_nodes = rows
    for cells in fewer_nodes:
        assert " ".join(cells) in printed
    # All nodes have a line for each figure.
    figures = " ".join(printed)
    assert [cell for cell in all_nodes if f" {cell} " not in figures] == []


@pytest.mark.slow
def test_plan_of_128_nodes_fits_a_screen(printed_plan):
    assert len(printed_plan) <= 45
    assert max(len(line) for line in printed_plan) <= 100
    text = "\n".join(printed_plan)
    assert "roofline" in text
    assert printed_plan[-1] == "next: autotune probe --model bert-120m --data DIR"
