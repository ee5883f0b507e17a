import errno
import os
import zlib

import numpy as np
import pytest

from trainer.files import DISK_BLOCK_BYTES, CorruptFile, check_file, write_file


def aligned(size, shift=0):
    room = np.random.default_rng(0).integers(
        0, 256, size + 2 * DISK_BLOCK_BYTES, dtype=np.uint8
    )
    begin = -room.ctypes.data % DISK_BLOCK_BYTES + shift
    return room[begin : begin + size]


@pytest.mark.parametrize(
    "size", [0, 1, 4096, 3 * 4096, 16 * 2**20, 16 * 2**20 + 4096, 32 * 2**20 + 5]
)
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_written_past_the_page_cache_is_what_was_to_be_written(
    tmp_path, size, shift
):
    content = aligned(size, shift)
    entry = write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    assert (entry.bytes, entry.crc32) == (size, zlib.crc32(content.tobytes()))


@pytest.mark.parametrize(
    "refused",
    [1, 2],
    ids=["a file system that has nothing but a page cache", "in the middle"],
)
def test_a_refusal_to_write_past_the_page_cache_leaves_the_rest_to_it(
    tmp_path, monkeypatch, refused
):
    content, calls, write = aligned(48 * 2**20), [], os.write

    def refuse_one(fd, chunk):
        calls.append(len(chunk))
        if len(calls) == refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, chunk)

    monkeypatch.setattr(os, "write", refuse_one)
    write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()


def test_a_directory_in_place_of_a_file_that_was_written_is_named(tmp_path):
    entry = write_file(tmp_path / "file", memoryview(b"what was written"))
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    with pytest.raises(CorruptFile, match="is not a file"):
        check_file(tmp_path / "file", entry)
