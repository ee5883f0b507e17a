"""Copy of a rank's tensors in host memory, laid out as a safetensors file.

The copy is written to disk as it is, while training changes the tensors.
"""

import itertools
import json
from collections.abc import Sequence

import torch

from trainer.checkpoint.format import Part, TensorEntry
from trainer.checkpoint.tensors import DTYPE_NAMES, TensorShard
from trainer.files import DISK_BLOCK_BYTES

_HEADER_SIZE_BYTES = 8
"""Size of the number with which a safetensors file begins: that of its header."""


class HostCopy:
    """Host memory of a safetensors file for the tensors that this rank writes.

    It is allocated once and used for every save. ``pinned`` is for tensors on a GPU.
    """

    def __init__(
        self, shards: Sequence[TensorShard], file: str, *, pinned: bool
    ) -> None:
        # Widest dtypes first, so that every tensor is aligned for its dtype.
        self._order = sorted(
            range(len(shards)), key=lambda number: -shards[number].local.element_size()
        )
        ordered = self._in_order(shards)
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

    def _in_order(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Return the shards in the order of the file."""
        return [shards[number] for number in self._order]

    def take(self, shards: Sequence[TensorShard]) -> None:
        """Copy all tensors into the buffer; from a GPU the copies are asynchronous."""
        for view, shard in zip(self._views, self._in_order(shards), strict=True):
            view.copy_(shard.local, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """Content of the safetensors file."""
        return self._file.numpy().data


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

    ``ends_bytes`` are the ends of the tensors behind the header.
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
    """Allocate host memory that is aligned for direct I/O."""
    memory = torch.empty(
        size_bytes + DISK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned
    )
    begin = -memory.data_ptr() % DISK_BLOCK_BYTES
    aligned = memory[begin : begin + size_bytes]
    aligned.fill_(0)  # allocates the pages now, not during the first copy
    return aligned


def _tensor_views(
    data: torch.Tensor, shards: Sequence[TensorShard], ends_bytes: Sequence[int]
) -> list[torch.Tensor]:
    """Return each tensor's part of the data, with its dtype and shape."""
    views = []
    for shard, end in zip(shards, ends_bytes, strict=True):
        memory = data[end - shard.local.nbytes : end]
        views.append(memory.view(shard.local.dtype).view(shard.local.shape))
    return views
