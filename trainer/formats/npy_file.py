"""Opening of one-dimensional ``.npy`` files for random reads. No torch here."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy

from trainer.formats.errors import BadConfig, unreadable

_MAX_NPY_HEADER_BYTES = 4096
"""Bytes read for the header. numpy pads that of a one-dimensional array to 128."""
_HEADER_READERS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
"""numpy's parsers of headers, by format version. It writes other versions only for
headers with names of fields that are not Latin-1, which arrays of numbers lack."""
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, TokenError, RecursionError)
"""Errors that numpy's parsers raise, as a header is a Python literal."""
_NEXT_STEP = "The dataset is corrupt. Prepare or copy it again."


def open_npy(path: Path, dtype: np.dtype[Any], length: int) -> tuple[int, int]:
    """Open a one-dimensional ``.npy`` file.

    The header is read here, not by ``numpy.load``, so that only numbers are loaded.

    Args:
        path: File to open.
        dtype: Type of its numbers.
        length: Number of them.

    Returns:
        The file's descriptor, which the caller closes, and the first byte of its data.

    Raises:
        UnreadableFile: If the file may be intact, but cannot be read.
        BadConfig: If it is missing, or its header or size is wrong.
    """
    with _file_errors(path):
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with _file_errors(path):
            data_offset_bytes = _check_npy(fd, dtype, length)
            # Reads are random, so read-ahead would only evict other data from the page
            # cache.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except BaseException:
        os.close(fd)
        raise
    return fd, data_offset_bytes


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert errors of a file that is opened in the block.

    Raises:
        UnreadableFile: If the file may be intact, but cannot be read.
        BadConfig: If it is missing or corrupt.
    """
    try:
        yield
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadConfig(
            f"cannot read {path}: {error.strerror}", next_step=_NEXT_STEP
        ) from error
    except _HEADER_ERRORS as error:
        raise BadConfig(f"{path}: {error}", next_step=_NEXT_STEP) from error


def _check_npy(fd: int, dtype: np.dtype[Any], length: int) -> int:
    """Return the first byte of an open ``.npy`` file's data.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it does not contain ``length`` numbers of ``dtype``. numpy's
            parsers also raise the other ``_HEADER_ERRORS``.
    """
    header = io.BytesIO(os.pread(fd, _MAX_NPY_HEADER_BYTES, 0))
    if not header.getvalue().startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an .npy file")
    version = npy.read_magic(header)
    read_header = _HEADER_READERS.get(version)
    if read_header is None:
        major, minor = version
        raise ValueError(f"version {major}.{minor} of the .npy format is not supported")
    shape, fortran_order, stored_dtype = read_header(header)
    if stored_dtype != dtype or shape != (length,) or fortran_order:
        raise ValueError(
            f"contains {stored_dtype.str} of shape {shape}, not {dtype.str} of"
            f" ({length},)"
        )
    data_offset_bytes = header.tell()
    if os.fstat(fd).st_size != data_offset_bytes + length * dtype.itemsize:
        raise ValueError("its size does not match its header")
    return data_offset_bytes
