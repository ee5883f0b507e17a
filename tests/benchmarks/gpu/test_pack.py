import importlib.metadata
from pathlib import Path

from benchmarks.gpu.pack import THERE, WANTED, download_command, lacking


def test_what_is_wanted_comes_with_its_needs_and_what_is_there_stays():
    names = lacking(THERE)
    assert set(WANTED) <= set(names)
    assert {"pydantic-core", "sqlalchemy"} <= set(names)
    assert not set(THERE) & set(names)


def test_what_is_said_to_be_there_spares_what_it_needs():
    names = lacking((*THERE, "matplotlib", "Accelerate"))
    assert not {"matplotlib", "contourpy", "accelerate"} & set(names)
    assert "pydantic" in names


def test_wheels_are_fetched_for_the_other_machine_in_the_versions_of_this_one():
    command = download_command(["optuna"], "3.12", Path("wheels"))
    assert f"optuna=={importlib.metadata.version('optuna')}" in command
    assert command[command.index("--python-version") + 1] == "3.12"
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_28_x86_64"} <= set(command)
