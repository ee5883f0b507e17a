"""Checkpoints that are written and read back; their names, and their order."""

import pytest

from testbed.examples.checkpoints import (
    CONTENT,
    state_of,
    tensor_entries,
    write_checkpoint,
)
from trainer.checkpoint.format import checkpoint_name, step_of
from trainer.checkpoint.stored_checkpoints import (
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)


def test_written_checkpoint_is_read_back(tmp_path):
    changes = {"health": {"usual": True}, "noise_scale": [0.5, 1e-7]}
    path = write_checkpoint(tmp_path, 5, **changes)
    manifest = read_checkpoint(path)
    assert manifest.state == state_of(5, **changes)
    assert manifest.tensors == tensor_entries()
    assert manifest.written_utc.endswith("Z")
    (file,) = manifest.files
    assert (path / file.name).read_bytes() == CONTENT


def test_checkpoints_after_a_rollback_are_newer(tmp_path):
    newest_first = [
        "step-000000005-rollback-10",  # as text, 10 would sort before 2
        "step-000000005-rollback-2",
        "step-000000010-rollback-1",
        "step-1000000000",  # as text, 10 digits would sort before 9
        "step-000000020",
        "step-000000005",
    ]
    for name in sorted(newest_first):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == newest_first


@pytest.mark.parametrize(
    ("step", "rollbacks", "name"),
    [
        pytest.param(5, 0, "step-000000005", id="no rollback"),
        pytest.param(5, 10, "step-000000005-rollback-10", id="ten rollbacks"),
        pytest.param(1_000_000_000, 0, "step-1000000000", id="ten digits"),
    ],
)
def test_name_tells_the_step(step, rollbacks, name):
    assert checkpoint_name(step, rollbacks) == name
    assert step_of(name) == step


def test_other_entries_are_not_checkpoints(tmp_path):
    for name in (
        "step-5",  # names have nine digits
        "step-000000007.corrupt-1",
        ".step-000000009.attempt-1.partial",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000030").symlink_to(tmp_path / "other")
    (tmp_path / "step-000000031").write_text("")
    assert list_checkpoints(tmp_path) == []


def test_missing_directory_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []


@pytest.fixture
def three_checkpoints(tmp_path):
    """Checkpoints of steps 1 to 3, of which only the first is good."""
    return [write_checkpoint(tmp_path, step, good=step == 1) for step in (1, 2, 3)]


def test_newest_checkpoint_is_found(tmp_path, three_checkpoints):
    newest, corrupt = newest_checkpoint(tmp_path)
    assert newest.path == three_checkpoints[-1]
    assert corrupt == []


def test_newest_good_checkpoint_is_found(tmp_path, three_checkpoints):
    newest, corrupt = newest_checkpoint(tmp_path, only_good=True)
    assert newest.path == three_checkpoints[0]
    assert corrupt == []
