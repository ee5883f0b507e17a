"""Tell out of memory from a crash: the one place that does, for training and for trials alike."""

import re

import torch

_REFUSED = re.compile(
    r"out of memory|can't allocate memory|bad_alloc"
    # Handles and workspaces of the libraries are not the caching allocator's.
    r"|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_\w*ALLOC"
    # oneDNN that is refused memory for its code says only that it could not; of an unknown shape it says more.
    r"|could not create a memory object|could not (create|execute) a primitive$",
    re.MULTILINE,
)
_PERHAPS = re.compile(r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)")
"""What the libraries say if a kernel cannot be loaded for want of memory, and of faults of any other kind."""
_NEARLY_FULL_BYTES = 512 * 2**20
_LONGEST_CHARACTERS = 300


def out_of_memory(error: BaseException) -> str | None:
    """Return the line of an error that says that memory ran out; None for any other error."""
    told = str(error)
    # A library's own text counts only in its own kind of error: a file may be called anything.
    said = _REFUSED.search(told) if isinstance(error, RuntimeError) else None
    if said is None and isinstance(error, RuntimeError) and _is_nearly_full():
        said = _PERHAPS.search(told)
    if said is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    start = 0 if said is None else told.rfind("\n", 0, said.start()) + 1
    return told[start:].partition("\n")[0][:_LONGEST_CHARACTERS] or type(error).__name__


def _is_nearly_full() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        return torch.cuda.mem_get_info()[0] < _NEARLY_FULL_BYTES
    except RuntimeError:  # a fault that has ended CUDA in this process is none of memory
        return False
