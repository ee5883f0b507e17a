"""Values of operators on a pretended GPU.

The values that each operator would have written on the GPU are computed on the CPU, in
the same memory. The stubs' device memory is memory of the process, so that a CPU tensor
may lie over a CUDA tensor's storage. An operator that has no CPU implementation fails:
silence would leave garbage. Collectives are the stubs' own.
"""

import ctypes
import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.nullgpu.values.attention import ATTENTION, attention

_NO_VALUES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "set_",
    "detach",
    "resize_",
}
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
        """Compute on the CPU, run the operator on the GPU, and put the values in.

        The operator runs for its allocations.
        """
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            # Such as of a DTensor: its operators come again, with what lies on this
            # rank.
            return NotImplemented
        name = func.overloadpacket.__name__
        home = torch.device(kwargs.get("device") or "cpu")
        home = next(
            (
                tensor.device
                for tensor in _tensors((args, *kwargs.values()))
                if tensor.is_cuda
            ),
            home,
        )
        if home.type != "cuda" or name in _NO_VALUES or func.namespace in _COLLECTIVES:
            return func(*args, **kwargs)
        names, writes = _schema(func)
        cpu_args, cpu_kwargs = (
            _to_cpu(args),
            {key: _to_cpu(value) for key, value in kwargs.items()},
        )
        named = dict(zip(names, cpu_args, strict=False)) | cpu_kwargs
        if name in ATTENTION:
            results = attention(name, named)
            outs = func(*args, **kwargs)
            for out, result in zip(outs, results, strict=False):
                over(out).copy_(result)
            return outs
        results = func(*cpu_args, **cpu_kwargs)
        # A kernel does nothing, but the copies and fills that an operator is made of
        # do: what was written is kept.
        kept = [
            (tensor, tensor.clone())
            for key in writes
            for tensor in _tensors((named.get(key),))
        ]
        outs = func(*args, **kwargs)
        for tensor, values in kept:
            tensor.copy_(values)
        if name in _HOST_NUMBERS:
            return results
        if isinstance(outs, (list, tuple)):
            return type(outs)(
                _filled(out, result, home)
                for out, result in zip(outs, results, strict=True)
            )
        return _filled(outs, results, home)


def turn_on() -> None:
    """Compute values for the rest of this process."""
    mode: Any = Values()  # type: ignore[no-untyped-call]
    mode.__enter__()


def over(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over a CUDA tensor's memory."""
    storage = tensor.untyped_storage()
    # FSDP gives the memory of unsharded weights back and keeps the tensor.
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = _raw(storage.data_ptr(), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(
        raw, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


@functools.lru_cache(4096)
def _raw(address: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer(
        (ctypes.c_char * size).from_address(address), dtype=torch.uint8
    ).untyped_storage()


@functools.cache
def _schema(func: OpOverload) -> tuple[list[str], list[str]]:
    arguments = func._schema.arguments
    return [a.name for a in arguments], [a.name for a in arguments if a.is_write]


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return over(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return type(value)([_to_cpu(item) for item in value])
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return (
        None
        if isinstance(value, torch.Generator) and value.device.type == "cuda"
        else value
    )


def _filled(out: Any, result: Any, home: torch.device) -> Any:
    if isinstance(out, list):
        return [_filled(item, its, home) for item, its in zip(out, result, strict=True)]
    if not isinstance(out, torch.Tensor) or out.data_ptr() == result.data_ptr():
        return out
    if out.shape != result.shape:  # it depends on values
        out = torch.empty_like(result, device=home)
    (over(out) if out.is_cuda else out).copy_(result)
    return out
