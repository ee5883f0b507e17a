from trainer.errors import BadConfig, printable


def test_escapes_control_characters():
    assert (
        printable("a\x1b[2Jb\r\x07\nc\u202ed\tä") == "a\\x1b[2Jb\\r\\x07\nc\\u202ed\\tä"
    )


def test_errors_escape_control_characters():
    error = BadConfig("unknown key 'x\x1b]0;'", next_step="remove 'x\x1b]0;'")
    assert error.message == "unknown key 'x\\x1b]0;'"
    assert error.next_step == "remove 'x\\x1b]0;'"
