import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from testbed.examples.checkpoints import (
    CONTENT,
    entries,
    refusing,
    state_of,
    write_checkpoint,
)
from trainer.checkpoint import format
from trainer.checkpoint.format import (
    BadCheckpoint,
    checkpoint_name,
    list_checkpoints,
    prune,
    read_checkpoint,
)
from trainer.config.tables import canonical_sha256
from trainer.errors import BadConfig, DiskTrouble


def write_share(
    root, rank, writers, begin=0, end=4, *, content=CONTENT, timeout_s=10.0, **options
):
    """Write the rows from ``begin`` to ``end`` of the checkpoint of step 5, as one of
    several writers."""
    name = checkpoint_name(5, 0)
    writer = format.CheckpointWriter(
        root,
        name,
        attempt=1,
        rank=rank,
        writers=writers,
        timeout_s=timeout_s,
        **options,
    )
    writer.write(memoryview(content), entries(rank, begin, end), state_of())


def changed(path, change):
    """Change a checkpoint's manifest as one would who means to deceive, with the hash
    that it must then have."""
    table = json.loads((path / "manifest.json").read_text())
    change(table)
    del table["content_sha256"]
    (path / "manifest.json").write_text(
        json.dumps(table | {"content_sha256": canonical_sha256(table)})
    )


def steps_in(root):
    return [format.step_of(path.name) for path in list_checkpoints(root)]


def test_what_was_written_is_read_back_and_replaces_what_the_step_had_before(tmp_path):
    write_checkpoint(tmp_path, 5, content=b"other")
    path = write_checkpoint(
        tmp_path, 5, health={"usual": True}, noise_scale=[0.5, 1e-7]
    )
    manifest = read_checkpoint(path)
    assert manifest.state == state_of(
        5, health={"usual": True}, noise_scale=[0.5, 1e-7]
    )
    assert manifest.tensors == entries()
    assert manifest.written_utc.endswith("Z")
    (file,) = manifest.files
    assert (path / file.name).read_bytes() == CONTENT
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == [path.name]
    assert (
        format.parse_manifest(json.loads(format.manifest_text(manifest)), "told")
        == manifest
    )


def test_what_was_written_after_a_rollback_is_newer_than_what_was_before(tmp_path):
    order = [(5, 10), (5, 2), (10, 1), (1_000_000_000, 0), (20, 0), (5, 0)]
    for step, rollbacks in sorted(order):
        (tmp_path / checkpoint_name(step, rollbacks)).mkdir()
    for name in (
        "step-5",
        "step-000000007.corrupt-1",
        ".step-000000009.attempt-1.partial",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000030").symlink_to(tmp_path / "other")
    (tmp_path / "step-000000031").write_text("")
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        checkpoint_name(*place) for place in order
    ]
    assert steps_in(tmp_path)[2] == 10
    assert list_checkpoints(tmp_path / "nowhere") == []
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 6, rollbacks=1)
    assert (tmp_path / "latest").read_text() == "step-000000006-rollback-1\n"


def test_the_last_ones_the_milestones_and_the_newest_good_one_stay(tmp_path):
    for step in range(1, 10):
        write_checkpoint(tmp_path, step, good=step in (2, 5))
    removed = prune(tmp_path, keep_last=2, keep_every_steps=3)
    assert steps_in(tmp_path) == [9, 8, 6, 5, 3]
    assert sorted(removed) == [checkpoint_name(step, 0) for step in (1, 2, 4, 7)]
    assert not list(tmp_path.glob(".*"))
    assert prune(tmp_path, keep_last=2, keep_every_steps=3) == []
    write_checkpoint(tmp_path, 7, good=True)
    # Corrupt: no good one to keep.
    (tmp_path / checkpoint_name(7, 0) / "manifest.json").write_text("{}")
    prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [9, 5]


def test_a_file_that_is_cut_short_or_has_a_turned_bit_anywhere_is_named(tmp_path):
    path, random = write_checkpoint(tmp_path, 5), np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for number in range(30):
            place = int(random.integers(len(whole)))
            turned = bytes([whole[place] ^ (1 << int(random.integers(8)))])
            file.write_bytes(
                whole[:place]
                if number % 2
                else whole[:place] + turned + whole[place + 1 :]
            )
            with pytest.raises(BadCheckpoint, match=re.escape(str(file))):
                read_checkpoint(path)
        file.unlink()
        with pytest.raises(BadCheckpoint, match=rf"{path.name}.*No such file"):
            read_checkpoint(path)
        file.write_bytes(whole + b" ")
        if file.suffix != ".json":  # a blank behind JSON means nothing
            with pytest.raises(BadCheckpoint):
                read_checkpoint(path)
        file.write_bytes(whole)
    read_checkpoint(path)


def test_the_newest_whole_one_is_found_and_those_passed_over_are_told(tmp_path):
    old, middle, new = (
        write_checkpoint(tmp_path, step, good=step == 1) for step in (1, 2, 3)
    )
    assert format.newest_checkpoint(tmp_path)[0][0] == new
    found, corrupt = format.newest_checkpoint(tmp_path, good=True)
    assert (found[0], corrupt) == (old, [])
    (new / "rank-00000.safetensors").write_bytes(CONTENT[:-1])
    (middle / "manifest.json").unlink()
    (found, manifest), corrupt = format.newest_checkpoint(tmp_path)
    assert (found, manifest.state.step) == (old, 1)
    assert [path for path, _ in corrupt] == [new, middle]
    assert "1,023 bytes, expected 1,024" in corrupt[0][1]
    (old / "manifest.json").write_text("")
    assert format.newest_checkpoint(tmp_path)[0] is None


def test_shares_of_several_writers_are_joined_in_order(tmp_path):
    for rank in (3, 2, 0):  # the first waits for all others
        write_share(
            tmp_path,
            rank,
            [0, 2, 3],
            3 - rank,
            4 - rank,
            content=bytes([rank]) * 10 + b"end",
        )
    (path,) = list_checkpoints(tmp_path)
    manifest = read_checkpoint(path)
    assert [part.begin for part in manifest.tensors["weights.a"].parts] == [0, 1, 3]
    names = [f"rank-0000{rank}.safetensors" for rank in (0, 2, 3)]
    assert [file.name for file in manifest.files] == names
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names]
    assert (path / names[1]).read_bytes() == b"\2" * 10 + b"end"


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error", [FULL, MemoryError("no room")], ids=["its disk fails", "before it writes"]
)
def test_a_writer_that_fails_makes_the_first_fail_and_nothing_is_left(
    tmp_path, monkeypatch, error
):
    old = write_checkpoint(tmp_path, 1)
    if error is FULL:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "fsync", Mock(side_effect=FULL))
            write_share(tmp_path, 1, [0, 1])
    else:
        name = checkpoint_name(5, 0)
        format.CheckpointWriter(
            tmp_path, name, attempt=1, rank=1, writers=[0, 1], timeout_s=1.0
        ).give_up(error)
    with pytest.raises(OSError, match="rank 1 could not write its file") as caught:
        write_share(tmp_path, 0, [0, 1])
    # What is then done about it depends on that.
    assert caught.value.errno == (errno.ENOSPC if error is FULL else errno.EIO)
    with pytest.raises(
        TimeoutError, match=r"rank 1 has not written its file within 0\.2 s"
    ):
        write_share(tmp_path, 0, [0, 1], timeout_s=0.2)
    assert list_checkpoints(tmp_path) == [old]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "failing_call", [1, 2, 3, 4], ids=["file", "manifest", "directory", "latest"]
)
def test_a_full_disk_leaves_the_old_ones_and_nothing_half_done(
    tmp_path, monkeypatch, failing_call
):
    write_checkpoint(tmp_path, 1)
    calls, sync = [], os.fsync

    def sometimes_full(fd):
        calls.append(fd)
        if len(calls) == failing_call:
            raise FULL
        sync(fd)

    monkeypatch.setattr(os, "fsync", sometimes_full)
    if failing_call < 4:
        with pytest.raises(OSError, match="No space"):
            write_checkpoint(tmp_path, 2)
    else:  # it is there, and only the pointer to it is old
        write_checkpoint(tmp_path, 2)
    assert steps_in(tmp_path) == ([1] if failing_call < 4 else [2, 1])
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not list(tmp_path.glob(".*"))
    for path in list_checkpoints(tmp_path):
        read_checkpoint(path)
    monkeypatch.undo()
    assert write_checkpoint(tmp_path, 2) == list_checkpoints(tmp_path)[0]


def test_leftovers_of_earlier_starts_are_cleared_and_nothing_else(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    kept = {one.name for one in tmp_path.iterdir()} | {"step-000000003.corrupt-1"}
    for name in (
        ".step-000000006.attempt-1.partial",
        ".step-000000004.0a0b0c0d.removed",
        ".step-000000005.0a0b0c0d.replaced",
        "step-000000003.corrupt-1",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"x")
    format.clear_leftovers(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == kept
    read_checkpoint(path)


def _lead_away(name):
    def change(table):
        table["files"][0]["name"] = table["tensors"]["weights.a"]["parts"][0][
            "file"
        ] = name

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (_lead_away(name), "refers to files in other directories")
            for name in ("../rank-00000.safetensors", "/etc/passwd", "..", "", "a\0b")
        ),
        (
            lambda table: table["tensors"]["weights.a"]["parts"][0].update(
                file="rank-00001.safetensors"
            ),
            "does not list all of its files",
        ),
        (lambda table: table.update(unknown=1), "unknown"),
    ],
)
def test_a_manifest_that_means_to_deceive_is_refused(tmp_path, change, said):
    path = write_checkpoint(tmp_path)
    changed(path, change)
    with pytest.raises(BadCheckpoint, match=said):
        read_checkpoint(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("hostile"))


def refused(path, raw):
    (path / "manifest.json").write_bytes(raw)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)
    assert format.newest_checkpoint(path.parent)[0] is None
    prune(path.parent, keep_last=1, keep_every_steps=None)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(format.CheckpointManifest.model_fields)), JSON)
def test_a_manifest_with_any_value_in_place_of_its_own_is_refused(hostile, key, value):
    path = write_checkpoint(hostile.parent)
    table = json.loads((path / "manifest.json").read_text())
    assume(
        value != table[key]
        and not (key == "tensors" and value == {})
        and not (key == "files" and value == [])
    )
    assume(not (key == "written_utc" and isinstance(value, str)))
    changed(path, lambda table: table.update({key: value}))
    refused(path, (path / "manifest.json").read_bytes())


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text().map(str.encode)
    | JSON.map(lambda value: json.dumps(value).encode())
)
@example(b'{"a":' * 100 + b"1" + b"}" * 100)
@example(b"[" * 200_000)
@example(b"NaN")
@example(b'{"state": NaN}')
@example(b'{"a": "\\ud800"}')
@example(b"9" * 5000)
@example(b" " * (64 * 2**20 + 1))
def test_a_manifest_of_any_bytes_is_refused_as_damaged(hostile, raw):
    refused(hostile, raw)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_file_system_that_fails_or_refuses_says_nothing_about_a_checkpoint(
    tmp_path, monkeypatch, name, number
):
    path = write_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refusing(name, number))
        with pytest.raises(DiskTrouble, match=os.strerror(number)) as caught:
            read_checkpoint(path)
        with pytest.raises(DiskTrouble):  # and no older one is taken in its place
            format.newest_checkpoint(tmp_path)
        # Nor any removed, as the newest good one may be among them.
        if name == "manifest.json":
            with pytest.raises(DiskTrouble, match=os.strerror(number)):
                prune(tmp_path, keep_last=1, keep_every_steps=None)
        patch.setattr(Path, "open", refusing(name, errno.EACCES))
        with pytest.raises(BadConfig, match="Permission denied") as refused:
            read_checkpoint(path)
    assert caught.value.exit_code == 75
    assert "readable for this user" in refused.value.next_step
    read_checkpoint(path)
    assert steps_in(tmp_path) == [6, 5]


def test_a_save_clears_what_earlier_saves_of_the_same_start_left_and_no_other_starts(
    tmp_path,
):
    write_share(tmp_path, 1, [0, 1], number=1)  # after the first one gave up
    other = tmp_path / ".step-000000004.attempt-11.save-1.partial"
    other.mkdir()
    write_share(tmp_path, 1, [0, 1], 2, 4, number=2)
    assert len(list(tmp_path.glob(".*.partial"))) == 3
    write_share(tmp_path, 0, [0, 1], 0, 2, number=2)
    assert list(tmp_path.glob(".*.partial")) == [other]
    read_checkpoint(tmp_path / checkpoint_name(5, 0))


def test_a_share_that_keeps_growing_is_waited_for_however_long(tmp_path, monkeypatch):
    share = (
        tmp_path / ".step-000000005.attempt-1.save-1.partial" / "rank-00001.safetensors"
    )
    waits, progressed = [], []

    def sleep(_):
        waits.append(0.9)
        if len(waits) == 20:
            write_share(tmp_path, 1, [0, 1], 2, 4)
        elif len(waits) < 20:
            with share.open("ab") as file:
                file.write(b"x")

    monkeypatch.setattr(
        format,
        "time",
        SimpleNamespace(monotonic=lambda: 1000 + sum(waits), sleep=sleep),
    )
    write_share(
        tmp_path,
        0,
        [0, 1],
        0,
        2,
        timeout_s=1.0,
        progressed=lambda: progressed.append(len(waits)),
    )
    read_checkpoint(tmp_path / checkpoint_name(5, 0))
    assert sum(waits) > 15
    assert len(set(progressed)) == 20  # so that nobody takes it for hung
