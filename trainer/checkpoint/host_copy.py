"""Copy of a rank's tensors in host memory, laid out as a safetensors file.

The copy is written to disk as it is, while training changes the tensors.
"""

import itertools
import json
import re
from collections.abc import Sequence

import torch

from trainer.checkpoint.format import Part, TensorEntry
from trainer.checkpoint.tensors import DTYPE_NAMES, TensorShard
from trainer.formats.files import DISK_BLOCK_BYTES

_HEADER_SIZE_BYTES = 8
"""Size of the number with which a safetensors file begins: that of its header."""
_ALLOCATION_FAILED = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|(CUDA|HIP) error: out of memory"
)
"""Messages of torch if host memory cannot be allocated: those of its CPU allocator, and
of the driver for pinned memory. torch has no class for these errors:
``torch.OutOfMemoryError`` is only for memory of the GPU."""


class HostCopy:
    """Host memory of a safetensors file for the tensors that this rank writes.

    It is allocated once and used for every save.

    Args:
        shards: Tensors to copy, whose values ``take`` copies.
        file: Name of the file in the checkpoint.
        pinned: Whether to allocate pinned memory, as for tensors on a GPU.

    Raises:
        MemoryError: If host memory is too small.
    """

    def __init__(
        self, shards: Sequence[TensorShard], file: str, *, pinned: bool
    ) -> None:
        ordered = _widest_dtype_first(shards)
        ends_bytes = list(itertools.accumulate(shard.local.nbytes for shard in ordered))
        self.tensors = {shard.name: _tensor_entry(shard, file) for shard in ordered}
        """Entries of the tensors for the checkpoint's manifest."""
        header = _safetensors_header(ordered, ends_bytes)
        data_bytes = ends_bytes[-1] if ends_bytes else 0
        self._file = _aligned_memory(len(header) + data_bytes, pinned=pinned)
        self._file[: len(header)] = torch.frombuffer(
            bytearray(header), dtype=torch.uint8
        )
        data = self._file[len(header) :]
        self._views = _tensor_views(data, ordered, ends_bytes)

    def take(self, shards: Sequence[TensorShard]) -> None:
        """Copy the tensors into the file; from a GPU the copies are asynchronous.

        Args:
            shards: The shards of which this copy was made, with their present values.
        """
        for view, shard in zip(self._views, _widest_dtype_first(shards), strict=True):
            view.copy_(shard.local, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """Content of the safetensors file."""
        return self._file.numpy().data


def _widest_dtype_first(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Return shards in the order of the file, in which each is aligned for its dtype.

    Shards with equally wide dtypes stay in order.
    """
    return sorted(shards, key=lambda shard: shard.local.element_size(), reverse=True)


def _tensor_entry(shard: TensorShard, file: str) -> TensorEntry:
    """Describe a tensor whose part is in the given file."""
    return TensorEntry(
        dtype=DTYPE_NAMES[shard.local.dtype],
        shape=list(shard.shape),
        parts=[Part(file=file, begin=shard.begin, end=shard.end)],
    )


def _safetensors_header(
    shards: Sequence[TensorShard], ends_bytes: Sequence[int]
) -> bytes:
    """Return the header of a safetensors file, padded to whole disk blocks.

    Args:
        shards: Tensors in the order of the file.
        ends_bytes: Offset of each tensor's end from the end of the header.
    """
    table = {
        shard.name: {
            "dtype": DTYPE_NAMES[shard.local.dtype],
            "shape": list(shard.local.shape),
            "data_offsets": [end - shard.local.nbytes, end],
        }
        for shard, end in zip(shards, ends_bytes, strict=True)
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    # The format allows spaces at the end of the header.
    text += b" " * (-(len(text) + _HEADER_SIZE_BYTES) % DISK_BLOCK_BYTES)
    return len(text).to_bytes(_HEADER_SIZE_BYTES, "little") + text


def _aligned_memory(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory that is aligned for direct I/O.

    Raises:
        MemoryError: If host memory is too small.
    """
    try:
        memory = torch.empty(
            size_bytes + DISK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned
        )
    except RuntimeError as error:
        if _ALLOCATION_FAILED.search(str(error)) is None:
            raise
        raise MemoryError(str(error)) from error
    begin = -memory.data_ptr() % DISK_BLOCK_BYTES
    aligned = memory[begin : begin + size_bytes]
    aligned.fill_(0)  # allocates the pages now, not during the first copy
    return aligned


def _tensor_views(
    data: torch.Tensor, shards: Sequence[TensorShard], ends_bytes: Sequence[int]
) -> list[torch.Tensor]:
    """Return each tensor's part of the data, with its dtype and shape.

    Args:
        data: The file's bytes behind its header.
        shards: Tensors in the order of the file.
        ends_bytes: Offset of each tensor's end in the data.
    """
    views = []
    for shard, end in zip(shards, ends_bytes, strict=True):
        memory = data[end - shard.local.nbytes : end]
        views.append(memory.view(shard.local.dtype).view(shard.local.shape))
    return views
