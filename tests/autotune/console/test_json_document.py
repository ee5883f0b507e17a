"""One JSON document per command, also for an error."""

import json

import pytest

from autotune.cli import run
from autotune.console.json_document import CommandFailure, document_text, wants_json

FAILURE = CommandFailure(code=3, message="it is wrong", next="Mend it.")


def test_document_names_its_versions():
    document = json.loads(document_text('{"size": 8}', None))
    assert document["size"] == 8
    assert document["schema_version"] == 1
    assert document["tool_version"]
    assert "error" not in document


def test_error_stands_beside_the_answer():
    document = json.loads(document_text('{"size": 8}', FAILURE))
    assert document["size"] == 8
    assert document["error"] == {
        "code": 3,
        "message": "it is wrong",
        "next": "Mend it.",
    }


@pytest.mark.parametrize("answer", ["[1, 2]", '{"schema_version": 3}'])
def test_rejects_an_answer_that_is_no_plain_object(answer):
    with pytest.raises(ValueError, match="the answer"):
        document_text(answer, None)


def test_failed_command_prints_one_document(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = run(["profile", "show", "missing.toml", "--json"])
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["code"] == code == 3
    assert error["message"] in printed.err
    assert error["next"]


def test_wrong_option_prints_a_document(capsys):
    code = run(["doctor", "--no-such-option", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code == 2


def test_option_after_dashes_is_no_request():
    assert not wants_json(["check", "--", "python", "train.py", "--json"])
