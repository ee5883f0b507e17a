"""The commands of the README work in order."""

import pytest

from tests.documentation.blocks import ROOT, commands_of, named_in_prose
from tests.documentation.typed_commands import SUBSTITUTIONS, substituted, typed


@pytest.mark.parametrize("page", SUBSTITUTIONS)
def test_every_substitution_replaces_something(page):
    used = [
        substituted(page, command)[1]
        for command in [*commands_of(ROOT / page), *named_in_prose(ROOT / page)]
    ]
    idle = set(range(len(SUBSTITUTIONS[page]))) - set().union(*used)
    assert [SUBSTITUTIONS[page][number] for number in sorted(idle)] == []


@pytest.mark.slow
@pytest.mark.system
def test_readme_commands_work(directory):
    typed("README.md", directory)
    assert (directory / "demo" / "reports" / "report.html").is_file()
