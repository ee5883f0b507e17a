"""Device behaviour that the meta device lacks: autocast, attention kernels, dropout.

On meta tensors autocast silently does nothing, and attention falls back to explicit
weights. A CPU's dropout keeps its mask in full precision, and CUDA's in a byte per
element.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autotune.memory.decide.overheads import DeviceKind
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.attention_kernels import attend
from autotune.memory.jobs.autocast import Bf16Casts
from autotune.memory.jobs.autocast_functions import (
    CAST_TO_BF16,
    CAST_TO_FP32,
    FP32_RESULT,
)

NAMESPACES = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg)
"""Namespaces of functions: the private one holds some that ``functional`` calls."""


class DeviceRules(TorchFunctionMode):
    """Mode in whose ``with`` block functions behave as they would on a device.

    The casts of autocast stay on in backward, too. This is safe: functions that only
    backward calls are in no list, and functions that backward recomputes ran under
    autocast in forward, so their inputs must be cast again.

    Args:
        kind: Device to imitate.
        bf16: True to cast as autocast to bf16 does.
        recorder: Recorder of the allocations, which labels bf16 copies of weights.
    """

    def __init__(
        self, kind: DeviceKind, *, bf16: bool, recorder: AllocationRecorder
    ) -> None:
        super().__init__()
        self._on_gpu = kind == "cuda"
        self._bf16 = bf16
        self._casts = Bf16Casts(recorder)
        self._reductions_by_all: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Results of ``all`` over a whole tensor, as keys whose values have no meaning:
        torch has no weak set by identity."""
        self._rules: dict[Any, Callable[..., Any]] = {}
        """Functions that replace torch's: each gets the function and its arguments."""
        self._set_rule(["backward"], self._backward_rule)
        self._set_rule(["scaled_dot_product_attention"], self._attention_rule)
        self._set_rule(["all"], self._all_rule)
        self._set_rule(["__bool__"], self._truth_rule)
        if bf16:
            self._set_rule(CAST_TO_BF16[kind], self._casts.call_in_bf16)
            self._set_rule(CAST_TO_FP32[kind], self._casts.call_in_fp32)
            self._set_rule(FP32_RESULT[kind], self._casts.call_for_fp32_result)
        if self._on_gpu:
            self._set_rule(["dropout"], self._dropout_rule)

    def _set_rule(self, names: Sequence[str], rule: Callable[..., Any]) -> None:
        """Set the rule of all functions of these names, in every namespace of torch."""
        for name in names:
            for namespace in NAMESPACES:
                if hasattr(namespace, name):
                    self._rules[getattr(namespace, name)] = rule

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Torch turns the mode off while this runs, so that rules may call functions.
        rule = self._rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(func, *args, **(kwargs or {}))

    @contextmanager
    def autocast(self, device_type: str) -> Iterator[None]:
        """Replace the model's own autocast.

        It keeps the bf16 copy of each weight until the block ends. The casts themselves
        do not depend on the block: a recomputation in backward casts a weight again.

        Args:
            device_type: Type of the traced device, which has no autocast; ignored.
        """
        with self._casts.keep_copies():
            yield

    def _backward_rule(
        self, _func: object, loss: torch.Tensor, **_options: object
    ) -> None:
        """Run ``Tensor.backward`` with the rules on, for what it recomputes.

        Torch's own function would call this rule again, so the engine is called
        directly. Its options, such as ``retain_graph``, are left out: no traced step
        passes one.
        """
        with self:
            _engine_run_backward(
                (loss,),
                grad_tensors=(torch.ones_like(loss),),
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _all_rule(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute ``all``, and remember its result for ``_truth_rule``."""
        result: torch.Tensor = func(*args, **kwargs)
        if result.dim() == 0:
            self._reductions_by_all[result] = True
        return result

    def _truth_rule(self, func: Any, tensor: torch.Tensor) -> bool:
        """Return False for a result of ``all``, which has no content here.

        Transformers builds no mask if all of a padding mask is set. The worst case is
        that it is not, which takes memory.
        """
        if tensor in self._reductions_by_all:
            return False
        return bool(func(tensor))

    def _dropout_rule(
        self,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        """Call CUDA's fused dropout, which keeps its mask in a byte per element."""
        if not training or not 0 < p < 1:
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        dropped, _mask = torch.native_dropout(input, p, True)
        return dropped

    def _attention_rule(  # noqa: PLR0917 - torch's own order
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Call the kernel that the device would choose, with its preparations.

        Keys and values are repeated for grouped queries, and a mask of truth values
        becomes one to add. On the meta device torch would choose explicit weights.
        """
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            additive = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = additive.masked_fill_(attn_mask.logical_not(), -math.inf)
        tensors = (query, key, value, attn_mask)
        if self._bf16:
            tensors = self._casts.cast(tensors, torch.bfloat16)
        return attend(
            *tensors, dropout_p, is_causal, scale, explicit=func, cuda=self._on_gpu
        )
