import json
import math

import pytest

from testbed.examples.checkpoints import header_of
from testbed.examples.run_rows import row_of
from trainer.formats.errors import BadConfig
from trainer.formats.run_record import RUN_SCHEMA_VERSION, read_run
from trainer.record.writer import RunWriter


@pytest.fixture
def run(tmp_path):
    """Directory of a run with two rows."""
    writer = RunWriter(tmp_path / "r")
    writer.start(header_of())
    writer.append(row_of(1))
    writer.append(row_of(2))
    return writer.directory


def change_loss(run, *, step, loss):
    """Change the loss of a step in ``steps.jsonl``, as another program might."""
    file = run / "steps.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (row,) = [row for row in rows if row["step"] == step]
    row["loss"] = loss
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rejects_directory_without_a_run(tmp_path):
    with pytest.raises(BadConfig, match="not a run"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "version",
    [
        pytest.param(RUN_SCHEMA_VERSION - 1, id="older"),
        pytest.param(RUN_SCHEMA_VERSION + 1, id="newer"),
    ],
)
def test_rejects_other_schema_version(run, version):
    path = run / "run.json"
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {"schema_version": version}))
    with pytest.raises(BadConfig, match="schema_version"):
        read_run(run)


def test_names_the_line_of_an_invalid_row(run):
    change_loss(run, step=2, loss="high")
    with pytest.raises(BadConfig, match=r"steps\.jsonl, line 2: ") as raised:
        read_run(run)
    assert "The run record is corrupt" in raised.value.next_step


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_leaves_out_rows_that_are_not_finite(run, loss):
    change_loss(run, step=1, loss=loss)
    assert read_run(run).steps == (row_of(2),)
