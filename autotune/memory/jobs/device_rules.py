"""Device behaviour that the meta device lacks: autocast, attention kernels, dropout.

On meta tensors autocast silently does nothing, and attention falls back to explicit
weights. A CPU's dropout keeps its mask in full precision, and CUDA's in a byte per
element. The lists of operators are those of ``ATen/autocast_mode.h`` (CUDA) and
``ATen/autocast_mode.cpp`` (CPU) of torch 2.13; a test compares them with torch's.
"""

import math
from collections.abc import Callable, Iterator
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
from autotune.memory.values import Term

_CAST_TO_BF16_ON_BOTH = (
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
    " prelu addmm matmul mm vecdot linear addbmm baddbmm bmm __matmul__"
)
_CAST_TO_BF16: dict[DeviceKind, str] = {
    "cuda": (
        f"{_CAST_TO_BF16_ON_BOTH} convolution addmv addr einsum mv chain_matmul"
        " multi_dot gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"
    ),
    "cpu": _CAST_TO_BF16_ON_BOTH,
}
"""Functions whose inputs autocast casts to bf16, by device."""
_CAST_TO_FP32: dict[DeviceKind, str] = {
    "cuda": (
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"
        " pow __pow__ softplus layer_norm native_layer_norm rms_norm group_norm"
        " cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss"
        " hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss"
        " margin_ranking_loss multilabel_margin_loss soft_margin_loss"
        " triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist"
        " pdist cdist renorm logsumexp cross_entropy frobenius_norm nuclear_norm"
        " nll_loss2d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
        " upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
    ),
    "cpu": (
        "avg_pool3d binary_cross_entropy grid_sampler polar prod quantile nanquantile"
        " stft cdist trace cholesky_inverse nll_loss poisson_nll_loss"
        " cosine_embedding_loss hinge_embedding_loss l1_loss smooth_l1_loss huber_loss"
        " mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss"
        " triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits"
    ),
}
"""Functions whose inputs autocast casts to fp32, by device."""
_FP32_RESULT: dict[DeviceKind, str] = {
    "cuda": "softmax log_softmax prod cumprod cumsum vector_norm matrix_norm norm sum",
    "cpu": "",
}
"""Functions that return fp32 from bf16, without a copy of their inputs, by device."""

_NAMESPACES = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg)
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
        self._recorder = recorder
        self._on_gpu = kind == "cuda"
        self._bf16 = bf16
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights and their copies, by identity of the weight, which stays alive."""
        self._keeps_copies = False
        self._reductions_by_all: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Results of ``all`` over a whole tensor, as keys whose values have no meaning:
        torch has no weak set by identity."""
        self._rules: dict[Any, Callable[..., Any]] = {}
        """Functions that replace torch's: each gets the function and its arguments."""
        self._set_rule("backward", self._backward_rule)
        self._set_rule("scaled_dot_product_attention", self._attention_rule)
        self._set_rule("all", self._all_rule)
        self._set_rule("__bool__", self._truth_rule)
        if bf16:
            self._set_rule(_CAST_TO_BF16[kind], self._bf16_rule)
            self._set_rule(_CAST_TO_FP32[kind], self._fp32_rule)
            self._set_rule(_FP32_RESULT[kind], self._fp32_result_rule)
        if self._on_gpu:
            self._set_rule("dropout", self._dropout_rule)

    def _set_rule(self, names: str, rule: Callable[..., Any]) -> None:
        """Set the rule of all functions of these names, in every namespace of torch."""
        for name in names.split():
            for namespace in _NAMESPACES:
                if hasattr(namespace, name):
                    self._rules[getattr(namespace, name)] = rule

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(func, *args, **(kwargs or {}))

    @contextmanager
    def autocast(self, device_type: str) -> Iterator[None]:
        """Replace the model's own autocast.

        It keeps the bf16 copy of each weight until the block ends, as torch's cache
        does. The casts themselves do not depend on the block: a recomputation in
        backward casts a weight again.

        Args:
            device_type: Type of the traced device, which has no autocast; ignored.
        """
        self._keeps_copies = True
        try:
            yield
        finally:
            self._keeps_copies = False
            self._copies.clear()

    # Rules. Torch turns the mode off while one runs.

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
        """Compute ``all``, and remember its result for the truth of it."""
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

    def _bf16_rule(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on bf16 copies, and release them in the order of arguments.

        Torch's C++ code casts arguments from the last to the first, and releases the
        copies that nothing saved in the opposite order. The recorder notes the order,
        which decides how blocks are reused.
        """
        cast_kwargs = self._cast(kwargs, torch.bfloat16)
        cast_args = list(self._cast(args, torch.bfloat16))
        result = func(*cast_args, **cast_kwargs)
        for position in range(len(cast_args)):
            cast_args[position] = None
        return result

    def _fp32_rule(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on fp32 copies."""
        return func(
            *self._cast(args, torch.float32), **self._cast(kwargs, torch.float32)
        )

    def _fp32_result_rule(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function on bf16, with an fp32 result unless another is requested."""
        tensor = args[0] if args else kwargs["input"]
        if tensor.dtype == torch.bfloat16 and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)

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
            tensors = self._cast(tensors, torch.bfloat16)
        return attend(
            *tensors, dropout_p, is_causal, scale, explicit=func, cuda=self._on_gpu
        )

    # Casts.

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return an argument with all tensors in it cast, from the last to the first.

        Other values, integers and fp64 stay as they are.
        """
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.dtype in {dtype, torch.float64}:
                return value
            return (
                self._bf16_copy(value) if dtype == torch.bfloat16 else value.to(dtype)
            )
        if isinstance(value, dict):
            return {name: self._cast(item, dtype) for name, item in value.items()}
        if isinstance(value, tuple | list):
            # Arguments of C++ functions are evaluated from the last to the first.
            backwards = [self._cast(item, dtype) for item in reversed(value)]
            return type(value)(reversed(backwards))
        return value

    def _bf16_copy(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy in bf16; that of a weight is kept while autocast is on."""
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(torch.bfloat16)
        if id(value) in self._copies:
            _weight, copy = self._copies[id(value)]
            return copy
        copy = value.to(torch.bfloat16)
        self._recorder.relabel([copy], Term.COPIES)
        if self._keeps_copies:
            self._copies[id(value)] = (value, copy)
        return copy
