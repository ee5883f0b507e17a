"""Errors of libraries that report a lack of memory, on the host or on a GPU."""

import contextlib
import re

import torch

from trainer.formats.errors import HOST_OUT_OF_MEMORY

_OUT_OF_MEMORY = re.compile(
    rf"out of memory|{HOST_OUT_OF_MEMORY.pattern}"
    # The caching allocator does not manage handles and workspaces of libraries.
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC"
    # oneDNN reports only this if it lacks memory for its code; for an unknown shape it
    # reports more.
    r"|could not create a memory object|could not (create|execute) a primitive$",
    re.MULTILINE,
)
_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
)
"""Errors that a lack of memory for a handle or a kernel can cause, but also any other
kind of fault."""
_NEARLY_FULL_BYTES = 512 * 2**20
"""Free GPU memory, in bytes, below which a vague error is taken for out of memory."""
_MAX_LINE_LENGTH = 300
"""Longest line that is returned, in characters; messages of libraries may hold a whole
stack trace."""


def out_of_memory(error: BaseException) -> str | None:
    """Return the line of an error that reports out of memory.

    Returns:
        The line, or the type of the error if it has no message; None if it is another
        kind of error.
    """
    match = _match_out_of_memory(error)
    if match is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    text = str(error)
    line_start = 0
    if match is not None:
        line_start = text.rfind("\n", 0, match.start()) + 1
    line, _, _ = text[line_start:].partition("\n")
    return line[:_MAX_LINE_LENGTH] or type(error).__name__


def _match_out_of_memory(error: BaseException) -> re.Match[str] | None:
    """Return the part of a message that reports out of memory, if any."""
    # Only errors of libraries count, as any text may be the name of a file.
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    match = _OUT_OF_MEMORY.search(text)
    if match is None and _gpu_is_nearly_full():
        match = _PERHAPS_OUT_OF_MEMORY.search(text)
    return match


def _gpu_is_nearly_full() -> bool:
    # A fault that ended CUDA in this process is unrelated to memory.
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_initialized():
            free_bytes, _ = torch.cuda.mem_get_info()
            return free_bytes < _NEARLY_FULL_BYTES
    return False


def is_vague(line: str) -> bool:
    """Return whether a line of ``out_of_memory`` may have another cause than memory."""
    return (
        _OUT_OF_MEMORY.search(line) is None
        and _PERHAPS_OUT_OF_MEMORY.search(line) is not None
    )
