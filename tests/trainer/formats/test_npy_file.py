"""Opening of ``.npy`` files: its result, and the error for each fault."""

import errno
import os

import numpy as np
import pytest
from numpy.lib import format as npy

from tests.trainer.data.descriptors import open_descriptors
from trainer.formats.errors import BadConfig, UnreadableFile
from trainer.formats.npy_file import open_npy

UINT16 = np.dtype(np.uint16)
NUMBERS = np.array([5, 6, 7], dtype=UINT16)


@pytest.fixture
def path(tmp_path):
    """A file that holds ``NUMBERS``."""
    path = tmp_path / "numbers.npy"
    np.save(path, NUMBERS)
    return path


@pytest.fixture(autouse=True)
def check_descriptors():
    """Check that a test leaves no file open."""
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def open_and_close(path):
    """Open a file that should hold ``NUMBERS``."""
    fd, _ = open_npy(path, UINT16, len(NUMBERS))
    os.close(fd)


def test_returns_descriptor_and_first_byte_of_data(path):
    fd, data_offset_bytes = open_npy(path, UINT16, len(NUMBERS))
    data = os.pread(fd, NUMBERS.nbytes, data_offset_bytes)
    os.close(fd)
    assert np.frombuffer(data, UINT16).tolist() == NUMBERS.tolist()


def write_header(path, header):
    """Write a file of format version 1.0 that consists of any header."""
    length = len(header).to_bytes(2, "little")
    path.write_bytes(npy.magic(1, 0) + length + header.encode())


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("no Python literal", id="no literal"),
        pytest.param("{'shape': (3", id="open bracket"),
        pytest.param("{[]: 1}", id="key that cannot be hashed"),
        pytest.param("-" * 4000 + "1", id="nested too deeply"),
    ],
)
def test_rejects_header_that_numpy_cannot_parse(path, header):
    write_header(path, header)
    with pytest.raises(BadConfig, match=path.name) as raised:
        open_and_close(path)
    assert "corrupt" in raised.value.next_step


def test_rejects_another_kind_of_file(path):
    path.write_text("text")
    with pytest.raises(BadConfig, match=r"not an \.npy file"):
        open_and_close(path)


def test_rejects_another_version_of_the_format(path):
    with path.open("wb") as file:
        npy.write_array(file, NUMBERS, version=(3, 0))
    with pytest.raises(BadConfig, match=r"version 3\.0 of the \.npy format"):
        open_and_close(path)


def test_rejects_missing_file(path):
    path.unlink()
    with pytest.raises(BadConfig, match="No such file"):
        open_and_close(path)


def test_rejects_directory(path):
    path.unlink()
    path.mkdir()
    with pytest.raises(BadConfig, match="Is a directory"):
        open_and_close(path)


@pytest.mark.parametrize("function", ["pread", "fstat"])
def test_failing_disk_is_not_a_corrupt_file(path, monkeypatch, function):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(UnreadableFile) as raised:
        patch.setattr(os, function, fail)
        open_and_close(path)
    assert f"cannot read {path}: Input/output error" in raised.value.message
    assert "corrupt" not in raised.value.next_step
