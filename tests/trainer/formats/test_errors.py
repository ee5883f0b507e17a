import pytest

from trainer.formats.errors import BadConfig, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\x1b[2Jb", "a\\x1b[2Jb", id="escape sequence"),
        pytest.param("a\rb", "a\\rb", id="carriage return"),
        pytest.param("a\x07b", "a\\x07b", id="bell"),
        pytest.param("a\tb", "a\\tb", id="tabulator"),
        pytest.param("a\u202eb", "a\\u202eb", id="right-to-left override"),
        pytest.param("a\nb", "a\nb", id="line break stays"),
        pytest.param("aä", "aä", id="letters stay"),
    ],
)
def test_escapes_characters_that_steer_the_terminal(text, shown):
    assert printable(text) == shown


def test_errors_are_printable():
    error = BadConfig("unknown key 'x\x1b]0;'", next_step="remove 'x\x1b]0;'")
    assert error.message == "unknown key 'x\\x1b]0;'"
    assert error.next_step == "remove 'x\\x1b]0;'"
