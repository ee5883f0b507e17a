"""Tensors of the training state, as a rank holds them under its parallel strategy.

A tensor is stored whole or in parts along its first dimension, so a checkpoint can be
read with any number of ranks and any strategy. Under ``ddp``, rank 0 writes everything;
under ``zero1``, each rank writes the optimizer state that it owns; under ``fsdp2``,
each writes its shard of everything.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from trainer.build import Training
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.runtime.ranks import Ranks

DTYPE_NAMES = {
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
"""Names of dtypes in safetensors files."""
_AVERAGE_KEYS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moving averages in an optimizer's state."""
_STATE_KEYS = ("step", *_AVERAGE_KEYS)
"""Names of all values in AdamW's state of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """Tensor of the training state as this rank holds it."""

    name: str
    """Name in checkpoints: its kind, and the name of the parameter or buffer."""
    local: torch.Tensor
    """This rank's part of the tensor; writing into it changes the training."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """Begin of ``local`` in the first dimension of the whole tensor; 0 for a scalar."""
    saved_here: bool
    """True if this rank writes the part to checkpoints."""
    shared: bool
    """True if all ranks hold the same whole tensor."""

    @property
    def end(self) -> int:
        """End (exclusive) of ``local`` in the first dimension; 1 for a scalar."""
        length = self.local.shape[0] if self.shape else 1
        return self.begin + length


def tensor_shards(training: Training, ranks: Ranks) -> list[TensorShard]:
    """Return weights, buffers and optimizer state, in the same order on every rank.

    Under zero1, a rank has the optimizer state of some parameters only, so the names
    differ between ranks.
    """
    module = training.module
    # Torch leaves out buffers that the module can compute again.
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
    return shards + _optimizer_shards(training, ranks)


def _optimizer_shards(training: Training, ranks: Ranks) -> list[TensorShard]:
    """Return the optimizer state of all parameters that have one on this rank."""
    optimizer = unwrap_optimizer(training.optimizer)
    is_zero1 = optimizer is not training.optimizer
    shards = []
    for name, parameter in training.module.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key in _STATE_KEYS:
            if key not in state:
                continue
            shard = _shard(f"{key}.{name}", state[key], ranks)
            if is_zero1:  # this rank owns the state, and no other rank holds it
                shard = replace(shard, saved_here=True, shared=False)
            shards.append(shard)
    return shards


def _shard(name: str, value: torch.Tensor, ranks: Ranks) -> TensorShard:
    """Describe a tensor, which only fsdp2 divides among ranks."""
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
    """Describe this rank's shard of a tensor that fsdp2 has divided."""
    local = value.to_local().detach()
    size = value.shape[0]
    mesh = value.device_mesh
    chunk_size = size
    if mesh.mesh_dim_names:
        # FSDP splits the first dimension as torch.chunk does: into equal chunks,
        # rounded up, of which the last ones are shorter or empty.
        ranks_per_copy = mesh.size(mesh.mesh_dim_names.index("shard"))
        chunk_size = math.ceil(size / ranks_per_copy)
    begin = min(size, mesh.get_local_rank("shard") * chunk_size)
    assert local.shape[0] == min(chunk_size, size - begin), name
    # With HSDP, every copy of the model holds the same shards; one of them saves.
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
    """Create the optimizer state as its first step would; existing state is unchanged.

    A checkpoint can then be saved, or be loaded into the state.
    """
    optimizer = unwrap_optimizer(training.optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                averages = {key: torch.zeros_like(parameter) for key in _AVERAGE_KEYS}
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **averages}
