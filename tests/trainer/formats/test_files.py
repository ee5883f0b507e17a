import errno
import os
import zlib

import numpy as np
import pytest

from trainer.formats.files import DISK_BLOCK_BYTES, CorruptFile, check_file, write_file

BLOCK = DISK_BLOCK_BYTES
CHUNK = 4 * 2**20
"""Size of the pieces in which a file is written."""


def content_of(size_bytes: int, *, offset_bytes: int = 0):
    """Return random bytes in memory, at an offset from an address aligned to blocks."""
    # Enough memory to begin at the next aligned address, and at the offset from it.
    memory = np.random.default_rng(0).integers(
        0, 256, size_bytes + 2 * BLOCK, dtype=np.uint8
    )
    begin = -memory.ctypes.data % BLOCK + offset_bytes
    return memory[begin : begin + size_bytes]


@pytest.mark.parametrize(
    "size_bytes",
    [
        pytest.param(0, id="empty"),
        pytest.param(1, id="1 byte"),
        pytest.param(BLOCK, id="1 block"),
        pytest.param(3 * BLOCK, id="3 blocks"),
        pytest.param(4 * CHUNK, id="4 chunks"),
        pytest.param(4 * CHUNK + BLOCK, id="4 chunks and a block"),
        pytest.param(8 * CHUNK + 5, id="8 chunks and 5 bytes"),
    ],
)
@pytest.mark.parametrize("offset_bytes", [0, 1], ids=["aligned", "unaligned"])
def test_writes_content_with_its_checksum(tmp_path, size_bytes, offset_bytes):
    content = content_of(size_bytes, offset_bytes=offset_bytes)
    entry = write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()
    assert entry.bytes == size_bytes
    assert entry.crc32 == zlib.crc32(content.tobytes())


@pytest.mark.parametrize(
    "failing_write",
    [
        pytest.param(1, id="a file system without direct I/O"),
        pytest.param(2, id="a file system that fails in the middle"),
    ],
)
def test_falls_back_to_the_page_cache(tmp_path, monkeypatch, failing_write):
    content = content_of(12 * CHUNK)
    writes = 0
    write = os.write

    def fail_once(fd, chunk):
        nonlocal writes
        writes += 1
        if writes == failing_write:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, chunk)

    monkeypatch.setattr(os, "write", fail_once)
    write_file(tmp_path / "file", content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()


def test_check_rejects_directory_in_place_of_file(tmp_path):
    entry = write_file(tmp_path / "file", memoryview(b"what was written"))
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    with pytest.raises(CorruptFile, match="is not a file"):
        check_file(tmp_path / "file", entry)
