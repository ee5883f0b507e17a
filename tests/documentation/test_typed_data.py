"""The commands of the page about data turn raw files into a training."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.documentation.blocks import ROOT, commands_of, named_in_prose
from tests.documentation.typed_commands import typed


@pytest.mark.slow
@pytest.mark.system
def test_own_data_becomes_a_training(directory):
    (directory / "local").mkdir()
    lines = [
        f"unit {number % 7} started after {number * 37 % 101} ms with code {number % 5}"
        for number in range(1500)
    ]
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.log").write_text("\n".join(lines))
    (directory / "events.jsonl").write_text(
        "\n".join(
            json.dumps({"doc": {"body": f"{command} again"}}) for command in lines
        )
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": lines}), directory / "events.parquet"
    )
    page = ROOT / "docs" / "data.md"
    of_each_kind = [
        command for command in named_in_prose(page) if "--out" in command.words
    ]
    assert len(of_each_kind) == 4
    typed("docs/data.md", directory, [*of_each_kind, *commands_of(page)])
