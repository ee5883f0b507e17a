"""Opening of one-dimensional ``.npy`` files for random reads. No torch here."""

import io
import os
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy

from trainer.errors import BadConfig, unreadable

_MAX_NPY_HEADER_BYTES = 4096


def open_npy(path: Path, dtype: np.dtype[Any], length: int) -> tuple[int, int]:
    """Open a one-dimensional ``.npy`` file.

    The header is read here, not by ``numpy.load``, so that only numbers are loaded.

    Returns:
        Its descriptor and the first byte of its data.

    Raises:
        UnreadableFile: If it may be intact, but cannot be read.
        BadConfig: If it is missing, or its header or size is wrong.
    """
    next_step = "The dataset is corrupt. Prepare or copy it again."
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadConfig(
            f"cannot read {path}: {error.strerror}", next_step=next_step
        ) from error
    try:
        start = _check_npy(fd, dtype, length)
    except (ValueError, TypeError, SyntaxError, TokenError) as error:
        os.close(fd)
        raise BadConfig(f"{path}: {error}", next_step=next_step) from error
    # Reads are random, so read-ahead would only evict other data from the page cache.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, start


def _check_npy(fd: int, dtype: np.dtype[Any], length: int) -> int:
    """Return the first byte of an open ``.npy`` file's data.

    Raises:
        ValueError: If it does not contain ``length`` numbers of ``dtype``. numpy's
            parser of the header also raises other errors.
    """
    header = io.BytesIO(os.pread(fd, _MAX_NPY_HEADER_BYTES, 0))
    readers = {
        (1, 0): npy.read_array_header_1_0,
        (2, 0): npy.read_array_header_2_0,
    }
    if not header.getvalue().startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an .npy file")
    read_header = readers.get(npy.read_magic(header))
    if read_header is None:
        raise ValueError("not an .npy file")
    shape, fortran_order, stored_dtype = read_header(header)
    if stored_dtype != dtype or shape != (length,) or fortran_order:
        raise ValueError(
            f"contains {stored_dtype.str} of shape {shape}, not {dtype.str} of"
            f" ({length},)"
        )
    start = header.tell()
    if os.fstat(fd).st_size != start + length * dtype.itemsize:
        raise ValueError("its size does not match its header")
    return start
