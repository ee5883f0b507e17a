from trainer.errors import BadConfig, printable


def test_what_steers_a_terminal_is_written_out_and_lines_stay():
    assert printable("a\x1b[2Jb\r\x07\nc\u202ed\tä") == "a\\x1b[2Jb\\r\\x07\nc\\u202ed\\tä"


def test_errors_that_quote_a_strangers_file_can_be_shown():
    error = BadConfig("unknown key 'x\x1b]0;'", next_step="remove 'x\x1b]0;'")
    assert (error.message, error.next_step) == ("unknown key 'x\\x1b]0;'", "remove 'x\\x1b]0;'")
