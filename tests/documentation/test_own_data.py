"""The commands of the page about own data are typed in order, on a little of each kind of raw data."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.documentation.blocks import ROOT, commands_of, named_in_prose
from tests.documentation.typed import typed, write_model

pytestmark = [pytest.mark.slow, pytest.mark.system]


def test_own_data_becomes_a_training(tmp_path):
    _raw(tmp_path)
    write_model(tmp_path / "my-encoder")
    (tmp_path / "local").mkdir()
    page = ROOT / "docs" / "own-data.md"
    of_each_kind = [one for one in named_in_prose(page) if "--out" in one.words]
    assert len(of_each_kind) == 4
    typed("docs/own-data.md", tmp_path, [*of_each_kind, *commands_of(page)])


def _raw(directory: Path) -> None:
    """A little of each kind of raw data that the page names."""
    lines = [f"unit {number % 7} started after {number * 37 % 101} ms with code {number % 5}" for number in range(1500)]
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.log").write_text("\n".join(lines))
    (directory / "events.jsonl").write_text("\n".join(json.dumps({"doc": {"body": f"{one} again"}}) for one in lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), directory / "events.parquet")
