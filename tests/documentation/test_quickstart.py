import re

import pytest

from tests.documentation.test_typed import typed

OF_THE_MACHINE = re.compile(
    r"\d|^…$|^(CPU|cpu_model) |^Wait until the machine is quiet"
)
"""Lines that differ by machine; the page was written on a busy one, and says so. "…"
stands for lines left out."""


@pytest.mark.slow
@pytest.mark.system
def test_the_quickstart_does_what_it_says_and_prints_what_it_shows(tmp_path):
    """Lines of the page's output that hold no figure, and no name of the machine, are
    in the real one as well."""
    for command, done in typed("docs/quickstart.md", tmp_path):
        plain = done.stdout.replace("\033[1m", "").replace("\033[0m", "")
        real = {" ".join(line.split()) for line in plain.splitlines()}
        shown = (" ".join(line.split()) for line in command.prints)
        missing = [
            line
            for line in shown
            if line and not OF_THE_MACHINE.search(line) and line not in real
        ]
        assert missing == [], (
            f"{command.where} prints other lines than the page shows:\n{done.stdout}"
        )
