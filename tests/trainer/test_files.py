import errno
import os
import zlib

import numpy as np
import pytest

from trainer.files import DISK_BLOCK_BYTES, CorruptFile, check_file, write_file

BLOCK = DISK_BLOCK_BYTES
MIB = 2**20


def content_of(size, offset=0):
    """Random bytes that begin at an offset from a block of the disk."""
    memory = np.random.default_rng(0).integers(0, 256, size + 2 * BLOCK, dtype=np.uint8)
    begin = -memory.ctypes.data % BLOCK + offset
    return memory[begin : begin + size]


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK, 3 * BLOCK, 16 * MIB, 16 * MIB + BLOCK, 32 * MIB + 5]
)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_writes_content_with_its_checksum(tmp_path, size, offset):
    content = content_of(size, offset)
    entry = write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    assert (entry.bytes, entry.crc32) == (size, zlib.crc32(content.tobytes()))


@pytest.mark.parametrize(
    "failing_call", [1, 2], ids=["a file system without direct I/O", "in the middle"]
)
def test_falls_back_to_the_page_cache(tmp_path, monkeypatch, failing_call):
    content = content_of(48 * MIB)
    calls = []
    write = os.write

    def fail_once(fd, chunk):
        calls.append(len(chunk))
        if len(calls) == failing_call:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, chunk)

    monkeypatch.setattr(os, "write", fail_once)
    write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()


def test_check_rejects_directory(tmp_path):
    entry = write_file(tmp_path / "file", memoryview(b"what was written"))
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    with pytest.raises(CorruptFile, match="is not a file"):
        check_file(tmp_path / "file", entry)
