"""Tensors of the training state, under any parallel strategy.

They are copied to host memory for a checkpoint, and restored from one. A tensor is
stored whole or in parts along its first dimension, so a checkpoint can be read with any
number of ranks and any strategy. Under ``ddp``, rank 0 writes everything; under
``zero1``, each rank writes the optimizer state that it owns; under ``fsdp2``, each
writes its shard of everything.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from trainer.build import Training
from trainer.checkpoint.format import CheckpointManifest, Part, TensorEntry
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.files import DISK_BLOCK_BYTES

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_AVERAGE_KEYS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moving averages in an optimizer's state."""
_STATE_KEYS = ("step", *_AVERAGE_KEYS)
_HEADER_SIZE_BYTES = 8
"""Size of the number with which a safetensors file begins: that of its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """Tensor of the training state as this rank holds it."""

    name: str
    local: torch.Tensor
    """This rank's part of the tensor; writing into it changes the training."""
    shape: tuple[int, ...]
    begin: int
    """Offset of ``local`` in the first dimension of the whole tensor."""
    saved_here: bool
    """True if this rank writes the part to checkpoints."""
    shared: bool
    """True if all ranks hold the same whole tensor."""

    @property
    def end(self) -> int:
        """End (exclusive) of ``local`` in the first dimension of the whole tensor.

        1 for a scalar.
        """
        return self.begin + (self.local.shape[0] if self.shape else 1)


def tensor_shards(training: Training, ranks: Ranks) -> list[TensorShard]:
    """Return weights, buffers and optimizer state, in the same order on every rank.

    The exception is zero1, where a rank has the optimizer state that it owns only.
    """
    module = training.module
    saved_names = module.state_dict().keys()
    shards = [
        _shard(f"weights.{name}", parameter, ranks)
        for name, parameter in module.named_parameters()
    ]
    shards += [
        _shard(f"weights.{name}", buffer, ranks)
        for name, buffer in module.named_buffers()
        if name in saved_names
    ]
    optimizer = unwrap_optimizer(training.optimizer)
    is_zero1 = optimizer is not training.optimizer
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in _STATE_KEYS:
            if key not in state:
                continue
            shard = _shard(f"{key}.{name}", state[key], ranks)
            if is_zero1:
                shard = replace(shard, saved_here=True, shared=False)
            shards.append(shard)
    return shards


def _shard(name: str, value: torch.Tensor, ranks: Ranks) -> TensorShard:
    if isinstance(value, DTensor):
        return _shard_of_dtensor(name, value)
    return TensorShard(
        name=name,
        local=value.detach(),
        shape=tuple(value.shape),
        begin=0,
        saved_here=ranks.leads,
        shared=True,
    )


def _shard_of_dtensor(name: str, value: DTensor) -> TensorShard:
    local = value.to_local().detach()
    size = value.shape[0]
    mesh = value.device_mesh
    # FSDP splits as torch.chunk along the first dimension.
    chunk_size = size
    if mesh.mesh_dim_names:
        ranks_per_copy = mesh.size(mesh.mesh_dim_names.index("shard"))
        chunk_size = -(-size // ranks_per_copy)
    begin = min(size, mesh.get_local_rank("shard") * chunk_size)
    assert local.shape[0] == min(chunk_size, size - begin), name
    is_first_copy = mesh.ndim == 1 or mesh.get_local_rank("copy") == 0
    return TensorShard(
        name=name,
        local=local,
        shape=tuple(value.shape),
        begin=begin,
        saved_here=is_first_copy,
        shared=False,
    )


def make_optimizer_state(training: Training) -> None:
    """Create the optimizer state as its first step would.

    A checkpoint can then be loaded into it. Existing state is unchanged.
    """
    optimizer = unwrap_optimizer(training.optimizer)
    parameters = itertools.chain.from_iterable(
        group["params"] for group in optimizer.param_groups
    )
    for parameter in parameters:
        if not optimizer.state[parameter]:
            averages = {key: torch.zeros_like(parameter) for key in _AVERAGE_KEYS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **averages}


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
        ordered = [shards[number] for number in self._order]
        ends_bytes = list(itertools.accumulate(shard.local.nbytes for shard in ordered))
        self.tensors = {shard.name: _tensor_entry(shard, file) for shard in ordered}
        header = _safetensors_header(ordered, ends_bytes)
        data_bytes = ends_bytes[-1] if ends_bytes else 0
        self._file = _aligned_memory(len(header) + data_bytes, pinned=pinned)
        self._file[: len(header)] = torch.frombuffer(
            bytearray(header), dtype=torch.uint8
        )
        data = self._file[len(header) :]
        self._views = []
        for shard, end in zip(ordered, ends_bytes, strict=True):
            local = shard.local
            memory = data[end - local.nbytes : end]
            self._views.append(memory.view(local.dtype).view(local.shape))

    def take(self, shards: Sequence[TensorShard]) -> None:
        """Copy all tensors into the buffer; from a GPU the copies are asynchronous."""
        sources = [shards[number].local for number in self._order]
        for view, source in zip(self._views, sources, strict=True):
            view.copy_(source, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """Content of the safetensors file."""
        return self._file.numpy().data


def _tensor_entry(shard: TensorShard, file: str) -> TensorEntry:
    """Describe a tensor whose part is in the given file."""
    return TensorEntry(
        dtype=_DTYPE_NAMES[shard.local.dtype],
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
            "dtype": _DTYPE_NAMES[shard.local.dtype],
            "shape": list(shard.local.shape),
            "data_offsets": [end - shard.local.nbytes, end],
        }
        for shard, end in zip(shards, ends_bytes, strict=True)
    }
    text = json.dumps(table, separators=(",", ":")).encode()
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


def restore(
    training: Training,
    directory: Path,
    manifest: CheckpointManifest,
    ranks: Ranks,
    *,
    progressed: Callable[[], None] = lambda: None,
) -> None:
    """Load a checkpoint's tensors into a training.

    Any number of ranks and any strategy may have written it. Rank 0 reads tensors that
    all ranks hold, and broadcasts them. ``progressed`` is called before each tensor.

    Raises:
        BadConfig: If the checkpoint is of another model, or lacks a part.
    """
    make_optimizer_state(training)
    shards = tensor_shards(training, ranks)
    for shard in shards:
        _check_entry(manifest.tensors.get(shard.name), shard, directory)
    with torch.no_grad(), contextlib.ExitStack() as stack:

        @functools.cache
        def open_file(name: str) -> Any:
            return stack.enter_context(safe_open(directory / name, framework="pt"))

        for shard in shards:
            progressed()
            if ranks.leads or not shard.shared:
                parts = manifest.tensors[shard.name].parts
                if not _read(shard, parts, open_file):
                    raise BadConfig(
                        f"{directory} is incomplete: it lacks a part of {shard.name}",
                        next_step="Resume from another one: --resume PATH",
                    )
            if shard.shared:
                ranks.broadcast_tensor(shard.local)
    training.module.weights_changed()


def _check_entry(
    entry: TensorEntry | None, shard: TensorShard, directory: Path
) -> None:
    """Check that a stored tensor has the dtype and shape of this training's.

    Raises:
        BadConfig: If it differs, or is missing.
    """
    dtype = _DTYPE_NAMES[shard.local.dtype]
    if entry is None:
        stored = "missing"
    elif entry.dtype == dtype and tuple(entry.shape) == shard.shape:
        return
    else:
        stored = f"{entry.dtype} {entry.shape}"
    raise BadConfig(
        f"{directory} does not match the model: {shard.name} is {stored}, expected"
        f" {dtype} {list(shard.shape)} here",
        next_step="Resume with the profile that the run was started with.",
    )


def _read(
    shard: TensorShard, parts: Sequence[Part], open_file: Callable[[str], Any]
) -> bool:
    """Fill a tensor from the stored parts that overlap it.

    Return whether they cover all of it.
    """
    if not shard.shape:
        if parts:
            stored = open_file(parts[0].file).get_tensor(shard.name)
            shard.local.copy_(stored)
        return bool(parts)
    filled_to = shard.begin
    for part in parts:
        begin = max(part.begin, shard.begin)
        end = min(part.end, shard.end)
        # Parts are in order, so one that does not continue the last leaves a gap.
        if begin == filled_to and begin < end:
            target = shard.local[begin - shard.begin : end - shard.begin]
            file = open_file(part.file)
            stored = file.get_slice(shard.name)[begin - part.begin : end - part.begin]
            if stored.shape != target.shape:
                break
            target.copy_(stored)
            filled_to = end
    return filled_to >= shard.end
