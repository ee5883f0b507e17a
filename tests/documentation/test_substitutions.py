"""What is typed instead of what pages say."""

import pytest

from tests.documentation.blocks import ROOT, commands_of, named_in_prose
from tests.documentation.substitutions import SUBSTITUTIONS, substituted
from tests.documentation.typed import words_of


@pytest.mark.parametrize("page", SUBSTITUTIONS)
def test_every_substitution_has_something_to_replace(page):
    commands = [*commands_of(ROOT / page), *named_in_prose(ROOT / page)]
    used = [substituted(page, words_of(command))[1] for command in commands]
    idle = set(range(len(SUBSTITUTIONS[page]))) - set().union(*used)
    assert [SUBSTITUTIONS[page][number].pattern for number in sorted(idle)] == []
