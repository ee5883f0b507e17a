"""Manifests of checkpoints that are damaged, or changed by an attacker."""

import json

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from testbed.examples.checkpoints import write_checkpoint
from trainer.checkpoint.format import (
    MANIFEST_FILE,
    BadCheckpoint,
    CheckpointManifest,
    manifest_text,
    parse_manifest,
)
from trainer.checkpoint.stored_checkpoints import (
    newest_checkpoint,
    prune,
    read_checkpoint,
)
from trainer.formats.canonical_json import canonical_sha256

json_values = st.recursive(
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


def change_manifest(path, change):
    """Change a checkpoint's manifest, and its hash to match, as an attacker would.

    ``change`` is called with the table of the manifest, which it changes.
    """
    manifest_file = path / MANIFEST_FILE
    table = json.loads(manifest_file.read_text())
    change(table)
    del table["content_sha256"]
    table["content_sha256"] = canonical_sha256(table)
    manifest_file.write_text(json.dumps(table))


def assert_manifest_rejected(root, change, message):
    """Check that a checkpoint is rejected once its manifest is changed."""
    path = write_checkpoint(root)
    change_manifest(path, change)
    with pytest.raises(BadCheckpoint, match=message):
        read_checkpoint(path)


def assert_corrupt_with(path, manifest):
    """Check that a checkpoint with these bytes as manifest is corrupt, and skipped.

    No other checkpoint may be in its directory.
    """
    (path / MANIFEST_FILE).write_bytes(manifest)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)
    newest, _ = newest_checkpoint(path.parent)
    assert newest is None
    prune(path.parent, keep_last=1, keep_every_steps=None)  # which raises no error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint that tests share, and whose manifest they overwrite."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_manifest_text_is_parsed_back(tmp_path):
    manifest = read_checkpoint(write_checkpoint(tmp_path, 5))
    table = json.loads(manifest_text(manifest))
    assert parse_manifest(table, "a manifest") == manifest


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../rank-00000.safetensors", id="parent directory"),
        pytest.param("/etc/passwd", id="absolute path"),
        pytest.param("..", id="directory"),
        pytest.param("", id="empty"),
        pytest.param("a\0b", id="null character"),
    ],
)
def test_rejects_files_in_other_directories(tmp_path, name):
    def change(table):
        table["files"][0]["name"] = name
        table["tensors"]["weights.a"]["parts"][0]["file"] = name

    assert_manifest_rejected(tmp_path, change, "refers to files in other directories")


def test_rejects_part_in_an_unlisted_file(tmp_path):
    def change(table):
        table["tensors"]["weights.a"]["parts"][0]["file"] = "rank-00001.safetensors"

    assert_manifest_rejected(tmp_path, change, "does not list all of its files")


def test_rejects_unknown_key(tmp_path):
    def change(table):
        table["unknown"] = 1

    assert_manifest_rejected(tmp_path, change, "unknown")


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(CheckpointManifest.model_fields)), value=json_values)
def test_rejects_any_other_value_of_a_key(checkpoint, key, value):
    path = write_checkpoint(checkpoint.parent)  # intact again, in the same place
    table = json.loads((path / MANIFEST_FILE).read_text())
    # A checkpoint without tensors is valid, as is any text as time.
    assume(value != table[key])
    assume((key, value) != ("tensors", {}))
    assume(not (key == "written_utc" and isinstance(value, str)))
    change_manifest(path, lambda table: table.update({key: value}))
    assert_corrupt_with(path, (path / MANIFEST_FILE).read_bytes())


@settings(max_examples=100, deadline=None)
@given(
    manifest=st.binary(max_size=200)
    | st.text().map(str.encode)
    | json_values.map(lambda value: json.dumps(value).encode())
)
# Deeper than our limit, and than Python's limit of recursion.
@example(manifest=b'{"a":' * 100 + b"1" + b"}" * 100)
@example(manifest=b"[" * 200_000)
# Values that Python reads as JSON, but that have no canonical form to be hashed.
@example(manifest=b"NaN")
@example(manifest=b'{"state": NaN}')
@example(manifest=b'{"a": "\\ud800"}')
# A number of too many digits for Python, and a file above our limit.
@example(manifest=b"9" * 5000)
@example(manifest=b" " * (64 * 2**20 + 1))
def test_rejects_any_bytes_as_manifest(checkpoint, manifest):
    assert_corrupt_with(checkpoint, manifest)
