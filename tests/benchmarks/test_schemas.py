import json
import tomllib

import pytest
import typer
from jsonschema import Draft202012Validator

from autotune.cli import app
from benchmarks.schemas import ANSWERS, FILES, PAGE, PLACE, page, schemas, text_of

OPEN = {"config", "measured", "details", "figures"}
"""Fields whose content belongs to somebody else: transformers' config, what an event or a trial says of its kind."""


def _commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


@pytest.fixture(scope="module")
def generated():
    return schemas()


def test_every_command_that_answers_machines_has_a_schema_and_no_other():
    found = {
        name
        for name, command in _commands(typer.main.get_command(app))
        if any("--json" in option.opts for option in command.params)
    }
    assert found == set(ANSWERS)


def test_committed_schemas_are_what_the_types_say(generated):
    lying = {path.stem: path.read_text(encoding="utf-8") for path in PLACE.glob("*.json")}
    assert lying == {name: text_of(schema) for name, schema in generated.items()}, "run make figures"
    assert PAGE.read_text(encoding="utf-8") == page(), "run make figures"


def test_every_schema_is_one(generated):
    for schema in generated.values():
        Draft202012Validator.check_schema(schema)


def _open_objects(value, path=""):
    if isinstance(value, dict):
        if value.get("type") == "object" and value.get("additionalProperties") is True and "properties" not in value:
            yield path
        for name, inner in value.items():
            yield from _open_objects(inner, f"{path}/{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _open_objects(inner, f"{path}/{number}")


def test_no_object_is_left_undescribed(generated):
    for name, schema in generated.items():
        for path in _open_objects(schema):
            assert set(path.split("/")) & OPEN, f"{name}: {path}"


def test_words_under_fields_become_descriptions(generated):
    described = generated["launch-status"]["$defs"]["RunStanding"]["properties"]
    assert described["state"]["description"] == "In words, such as ``finished`` or ``running``."
    profile = generated["file-profile"]["$defs"]["TrainConfig"]["properties"]
    assert profile["micro_batch_rows"]["description"] == "Rows that one rank computes at once."


def test_shipped_profiles_are_as_their_schema_says(generated):
    for path in PLACE.parent.parent.glob("profiles/*.toml"):
        Draft202012Validator(generated["file-profile"]).validate(tomllib.loads(path.read_text()))


def test_a_key_that_does_not_exist_is_refused(generated):
    path = next(PLACE.parent.parent.glob("profiles/*.toml"))
    tables = tomllib.loads(path.read_text())
    tables["train"]["micro_batch_row"] = 3
    assert not Draft202012Validator(generated["file-profile"]).is_valid(tables)


def test_answers_and_files_are_told_apart_by_their_names(generated):
    assert set(generated) == {name.replace(" ", "-") for name in ANSWERS} | set(FILES)
    assert all(schema["$schema"].endswith("2020-12/schema") for schema in generated.values())
    assert json.loads((PLACE / "doctor.json").read_text())["title"] == "autotune doctor --json"
