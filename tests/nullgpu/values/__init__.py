"""Values: what each operator would have written on the GPU is computed on the CPU, in the same memory.

The stubs' device memory is memory of the process, so that a CPU tensor may lie over a CUDA tensor's storage. An
operator that has no CPU implementation fails: silence would leave garbage. Collectives are the stubs' own.
"""

import ctypes
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.nullgpu.values.attention import ATTENTION, attention

_NO_VALUES = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "record_stream", "is_pinned", "_pin_memory", "set_", "detach", "resize_",
}  # fmt: skip
_COLLECTIVES = {"c10d", "_c10d_functional"}
_HOST_NUMBERS = {"_local_scalar_dense", "equal"}


class Values(TorchDispatchMode):
    """Gives CUDA tensors the values that they would have."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute on the CPU first, run the operator on the GPU for its allocations, then put the values in."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # such as of a DTensor: its operators come again, with what lies on this rank
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        on_gpu = any(tensor.is_cuda for tensor in tensors) or (device and torch.device(device).type == "cuda")
        if not on_gpu or name in _NO_VALUES or func.namespace in _COLLECTIVES:
            return func(*args, **kwargs)
        named = {a.name: a.default_value for a in func._schema.arguments}
        named |= dict(zip(named, args, strict=False)) | kwargs
        named = tree_map(_to_cpu, named)
        if name in ATTENTION:
            results = attention(name, named)
            outs = func(*args, **kwargs)
            for out, result in zip(outs, results, strict=False):
                over(out).copy_(result)
            return outs
        results = func(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
        # A kernel does nothing, but the copies and fills that an operator is made of do: what was written is kept.
        written = [leaf for a in func._schema.arguments if a.is_write for leaf in tree_leaves(named[a.name])]
        kept = [(leaf, leaf.clone()) for leaf in written if isinstance(leaf, torch.Tensor)]
        outs = func(*args, **kwargs)
        for leaf, values in kept:
            leaf.copy_(values)
        if name in _HOST_NUMBERS:
            return results
        flat, spec = tree_flatten(outs)
        home = next((tensor.device for tensor in tensors if tensor.is_cuda), device)
        flat = [_filled(out, result, home) for out, result in zip(flat, tree_leaves(results), strict=True)]
        return spec.unflatten(flat) if hasattr(spec, "unflatten") else outs


def turn_on() -> None:
    """Compute values for the rest of this process."""
    mode: Any = Values()  # type: ignore[no-untyped-call]
    mode.__enter__()


def over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over a CUDA tensor's memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():  # FSDP gives the memory of unsharded weights back and keeps the tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return over(value) if value.is_cuda else value
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) and value.device.type == "cuda" else value


def _filled(out: Any, result: Any, device: torch.device | None) -> Any:
    if not isinstance(out, torch.Tensor) or out.data_ptr() == result.data_ptr():
        return out
    if out.shape != result.shape:  # it depends on values
        out = torch.empty_like(result, device=device)
    (over(out) if out.is_cuda else out).copy_(result)
    return out
