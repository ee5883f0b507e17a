"""Device behaviour that the meta device lacks: autocast, attention kernels, dropout.

On meta tensors autocast silently does nothing, and attention falls back to explicit
weights; a CPU's dropout keeps its mask in full precision, CUDA's a byte per element.
The lists of operators are those of ``ATen/autocast_mode.h`` (CUDA) and
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

_LOWER_ON_BOTH = (
    "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
    " prelu addmm matmul mm vecdot linear addbmm baddbmm bmm __matmul__"
)
_LOWER: dict[DeviceKind, str] = {
    "cuda": (
        f"{_LOWER_ON_BOTH} convolution addmv addr einsum mv chain_matmul multi_dot"
        " gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"
    ),
    "cpu": _LOWER_ON_BOTH,
}
"""Functions whose inputs autocast converts to 16 bits."""
_WIDER: dict[DeviceKind, str] = {
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
"""Functions whose inputs autocast converts to 32 bits."""
_WIDER_RESULT: dict[DeviceKind, str] = {
    "cuda": "softmax log_softmax prod cumprod cumsum vector_norm matrix_norm norm sum",
    "cpu": "",
}
"""Functions that take 16 bits and return 32, without a copy of their inputs."""


class DeviceRules(TorchFunctionMode):
    """Mode in whose ``with`` block functions behave as they would on a device.

    ``bf16`` is autocast to bf16, from the first forward to the last backward: functions
    called only by backward are on no list, and those that it recomputes were under
    autocast before. ``recorder`` labels 16-bit copies of weights.
    """

    def __init__(
        self, kind: DeviceKind, *, bf16: bool, recorder: AllocationRecorder
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._on_gpu = kind == "cuda"
        self.bf16 = bf16
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights and their copies, by identity of the weight, which stays alive."""
        self._keeps_copies = False
        self._all_results: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Results of ``all`` over a whole tensor."""
        self._rules: dict[Any, Callable[..., Any]] = {
            torch.Tensor.backward: self._backward
        }
        if bf16:
            self._add(_LOWER[kind], self._lower)
            self._add(_WIDER[kind], self._wider)
            self._add(_WIDER_RESULT[kind], self._wider_result)
        self._add("scaled_dot_product_attention", self._attend)
        self._add("all", self._all)
        self._rules[torch.Tensor.__bool__] = self._is_true
        if self._on_gpu:
            self._add("dropout", self._drop)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(func, *args, **(kwargs or {}))

    @contextmanager
    def autocast(self, _: str) -> Iterator[None]:
        """Enter autocast as on any device: it casts a weight once.

        Recomputation in backward casts it again.
        """
        self._keeps_copies = True
        try:
            yield
        finally:
            self._keeps_copies = False
            self._copies.clear()

    def _add(self, names: str, rule: Callable[..., Any]) -> None:
        """Set the rule of all functions of these names, wherever torch has them."""
        namespaces = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg)
        for name in names.split():
            for namespace in namespaces:
                if hasattr(namespace, name):
                    self._rules[getattr(namespace, name)] = rule

    def _backward(self, _: object, tensor: torch.Tensor, **__: object) -> None:
        # Rules are off inside a rule, but recomputation in backward needs them; torch's
        # own function would recurse.
        with self:
            _engine_run_backward(
                (tensor,),
                (torch.ones_like(tensor),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _all(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = func(*args, **kwargs)
        if result.dim() == 0:
            self._all_results[result] = True
        return result

    def _is_true(self, func: Any, tensor: torch.Tensor) -> bool:
        # transformers builds no mask if all of a padding mask is set; the worst case is
        # that it is not.
        if tensor in self._all_results:
            return False
        return bool(func(tensor))

    def _lower(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        lowered_kwargs = self._cast(kwargs, torch.bfloat16)
        lowered = list(self._cast(args, torch.bfloat16))
        result = func(*lowered, **lowered_kwargs)
        # Copies that nothing saved are released from the first to the last.
        while lowered:
            del lowered[0]
        return result

    def _wider(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(
            *self._cast(args, torch.float32), **self._cast(kwargs, torch.float32)
        )

    def _wider_result(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["input"]
        if tensor.dtype == torch.bfloat16 and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.dtype in {dtype, torch.float64}:
                return value
            return self._copy(value) if dtype == torch.bfloat16 else value.to(dtype)
        if isinstance(value, dict):
            return {name: self._cast(item, dtype) for name, item in value.items()}
        if isinstance(value, tuple | list):
            # Arguments of C++ functions are evaluated from the last to the first.
            backwards = [self._cast(item, dtype) for item in reversed(value)]
            return type(value)(reversed(backwards))
        return value

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy in bf16; that of a weight is kept while autocast is on."""
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(torch.bfloat16)
        if id(value) in self._copies:
            _, copy = self._copies[id(value)]
            return copy
        copy = value.to(torch.bfloat16)
        self._recorder.relabel([copy], Term.COPIES)
        if self._keeps_copies:
            self._copies[id(value)] = (value, copy)
        return copy

    def _drop(
        self,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or not 0 < p < 1:
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    def _attend(  # noqa: PLR0917 - torch's own order
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
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            additive = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = additive.masked_fill_(attn_mask.logical_not(), -math.inf)
        tensors = (query, key, value, attn_mask)
        if self.bf16:
            tensors = self._cast(tensors, torch.bfloat16)
        return attend(
            *tensors, dropout_p, is_causal, scale, explicit=func, cuda=self._on_gpu
        )
