"""Casts of autocast to bf16 on the meta device, where torch's own cast nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term


class Bf16Casts:
    """Calls of functions with casts of their arguments, as under autocast to bf16.

    Args:
        recorder: Recorder of the allocations, which labels bf16 copies of weights.
    """

    def __init__(self, recorder: AllocationRecorder) -> None:
        self._recorder = recorder
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights and their copies, by identity of the weight, which stays alive."""
        self._keeps_copies = False

    @contextmanager
    def keep_copies(self) -> Iterator[None]:
        """Keep the bf16 copy of each weight until the block ends, as torch's cache."""
        self._keeps_copies = True
        try:
            yield
        finally:
            self._keeps_copies = False
            self._copies.clear()

    def call_in_bf16(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on bf16 copies, and release them in the order of arguments.

        Torch's C++ code casts arguments from the last to the first, and releases the
        copies that nothing saved in the opposite order. The recorder notes the order,
        which decides how blocks are reused.
        """
        cast_kwargs = self.cast(kwargs, torch.bfloat16)
        cast_args = list(self.cast(args, torch.bfloat16))
        result = func(*cast_args, **cast_kwargs)
        for position in range(len(cast_args)):
            cast_args[position] = None
        return result

    def call_in_fp32(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on fp32 copies."""
        return func(*self.cast(args, torch.float32), **self.cast(kwargs, torch.float32))

    def call_for_fp32_result(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on bf16, with an fp32 result unless another is requested."""
        tensor = args[0] if args else kwargs["input"]
        if tensor.dtype == torch.bfloat16 and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument with all tensors in it cast, from the last to the first.

        Other values, integers and fp64 stay as they are.
        """
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.dtype in {dtype, torch.float64}:
                return value
            if dtype == torch.bfloat16:
                return self._bf16_copy(value)
            return value.to(dtype)
        if isinstance(value, dict):
            return {name: self.cast(item, dtype) for name, item in value.items()}
        if isinstance(value, tuple | list):
            # Arguments of C++ functions are evaluated from the last to the first.
            backwards = [self.cast(item, dtype) for item in reversed(value)]
            return type(value)(reversed(backwards))
        return value

    def _bf16_copy(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy in bf16; that of a weight is kept within ``keep_copies``."""
        is_weight = value.is_leaf and value.requires_grad
        if not is_weight or value.dtype != torch.float32:
            return value.to(torch.bfloat16)
        if id(value) in self._copies:
            _weight, copy = self._copies[id(value)]
            return copy
        copy = value.to(torch.bfloat16)
        self._recorder.relabel([copy], Term.COPIES)
        if self._keeps_copies:
            self._copies[id(value)] = (value, copy)
        return copy
