"""Precision of compute: weights of linear layers in bf16, cast once per optimizer step, and a residual stream in bf16.

Autocast casts every weight in every micro-batch, and every gradient back, which working
copies make unnecessary. Parameters stay in fp32, for optimizer, checkpoints and export.
Linear layers of the same input, such as query, key and value, are computed in one
matmul. Float8 matmuls are torchao's; they cast working copies and inputs while they
compute.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig

COMPILER_SAVES_COMPACT = torch.__version__ >= "2.13"
"""False for torch 2.11, whose compiler keeps fp32 for backward although given 16 bits,
and dropout's mask beside its seed: a step of BERT took 3 % longer on an H100."""
_SIBLINGS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names that transformers gives to linear layers of the same input, in the order of
their calls."""
_ALIGNED = 64
"""Multiple to which copies are padded, as kernels load aligned memory faster."""
_FLOAT8_MULTIPLE = 16
"""Multiple of which the dimensions of float8 matmuls must be."""
_AT_ONCE = 2**63 - 1
"""Priority of a link in backward: gradients of a part reach its parameters before other
parts are computed."""


class WorkingCopies:
    """Working copies, of ``dtype``, of a model's linear layers.

    Those in ``alone`` are not computed with others.
    """

    def __init__(
        self,
        model: nn.Module,
        alone: Sequence[nn.Module] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        lists = [
            module for module in model.modules() if isinstance(module, nn.ModuleList)
        ]
        # Layers, what else the encoder has, and the head.
        parts = (*itertools.chain(*lists), *model.children())
        links = [
            _Link(found, dtype)
            for part in parts
            if (found := _computed_together(part, alone))
        ]
        self.memory = [link.memory for link in links]
        self._copies = [copy for link in links for copy in link.views(link.copies)]
        self._parameters = [
            parameter for link in links for parameter in link.parameters
        ]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all weights; call this after every change of them."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._parameters)


def compute_weights(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight and bias that a linear layer computes with."""
    return getattr(linear, "compute_weight", linear.weight), getattr(
        linear, "compute_bias", linear.bias
    )


def project(
    linear: nn.Linear, input: torch.Tensor, features: slice | None = None
) -> torch.Tensor:
    """Return a linear layer's result as it computes it, or only some of its output features."""
    weight, bias = compute_weights(linear)
    if features is not None:
        weight, bias = weight[features], None if bias is None else bias[features]
    matmul = getattr(linear, "float8_matmul", None)
    if matmul is None:
        return functional.linear(input, weight, bias)
    result: torch.Tensor = matmul(input.to(weight.dtype), weight)
    return result if bias is None else result + bias


def check_float8(config: TrainConfig, device: torch.device, *, copies: bool) -> None:
    """Raise ``BadConfig`` if linear layers cannot compute in float8.

    ``copies`` is true if they have working copies.
    """
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    require(
        "float8=none",
        "torchao",
        "fp8",
        (
            (
                config.device == "cuda" and not old,
                "requires float8 Tensor Cores: an Ada, Hopper or newer GPU",
                "",
            ),
            (config.precision == "bf16", "requires bf16", "precision=bf16"),
            (
                config.compiled,
                "requires compiled layers, which fuse its casts",
                "compile=true",
            ),
            # It gathers weights in bf16 itself, without working copies.
            (
                config.parallel.strategy != "fsdp2",
                "cannot be used with fsdp2",
                "parallel.strategy=zero1",
            ),
            (
                copies,
                (
                    f"cannot be used with {config.model.config['model_type']!r}, which"
                    " has no working copies"
                ),
                "",
            ),
        ),
    )


def require(
    off: str, library: str, extra: str, conditions: Iterable[tuple[bool, str, str]]
) -> None:
    """Raise ``BadConfig`` unless a setting's conditions are fulfilled, and its library is installed by ``extra``.

    ``off`` turns it off. A condition has the reason if it is not fulfilled, and the
    setting that fulfils it, if any.
    """
    name = off.partition("=")[0]
    for fulfilled, reason, setting in conditions:
        if not fulfilled:
            steps = " or ".join(f"--set train.{one}" for one in (setting, off) if one)
            raise BadConfig(f"train.{name} {reason}", next_step=f"Use {steps}")
    if find_spec(library) is None:
        raise BadConfig(
            f"train.{name} requires {library}",
            next_step=f"Install it: pip install '.[{extra}]'",
        )


def use_float8(
    layers: Iterable[nn.Module],
    recipe: Literal["tensorwise", "rowwise"],
    *,
    emulate: bool = False,
) -> None:
    """Let linear layers with copies compute in float8 by a recipe of torchao.

    ``emulate`` rounds, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    # Converting a layer also replaces code of Inductor from which Triton generates
    # wrong stores of float8.
    any_layer = nn.Linear(_FLOAT8_MULTIPLE, _FLOAT8_MULTIPLE, device="meta")
    ways = [
        convert_to_float8_training(any_layer, config=replace(config, pad_inner_dim=pad))
        for pad in (False, True)
    ]
    aligned, padded = (one.linear_mm_config for one in ways)

    def matmul(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Dimension of the weight gradient's matmul.
        inner = input.numel() // input.shape[-1]
        how = padded if inner % _FLOAT8_MULTIPLE else aligned
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(
            input, weight.t(), how, config
        )
        return result

    for part in (part for layer in layers for part in layer.modules()):
        if isinstance(part, Linear) and not any(
            size % _FLOAT8_MULTIPLE for size in (part.in_features, *part.sizes)
        ):
            vars(part)["float8_matmul"] = matmul


def _computed_together(
    part: nn.Module, alone: Sequence[nn.Module]
) -> list[list[nn.Linear]]:
    linears = [
        one
        for one in part.modules()
        if type(one) is nn.Linear and one.weight.requires_grad
    ]
    found: list[list[nn.Linear]] = []
    for module, names in itertools.product(part.modules(), _SIBLINGS):
        siblings = [getattr(module, name, None) for name in names]
        if all(one in linears for one in siblings):
            together: list[Any] = [one for one in siblings if one not in alone]
            if len({(one.in_features, one.bias is None) for one in together}) == 1:
                found.append(together)
    taken = list(itertools.chain(*found))
    return [*found, *([one] for one in linears if one not in taken)]


class _Link:
    """Link of a part's working copies to its parameters.

    ``groups`` are linear layers that are computed together.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Linear]], dtype: torch.dtype
    ) -> None:
        owners = [(linears, name) for linears in groups for name in ("weight", "bias")]
        owners = [
            (linears, name)
            for linears, name in owners
            if getattr(linears[0], name) is not None
        ]
        pieces = [[getattr(one, name) for one in linears] for linears, name in owners]
        self.parameters: list[torch.Tensor] = list(itertools.chain(*pieces))
        shapes = [
            (sum(len(one) for one in of_one), *of_one[0].shape[1:]) for of_one in pieces
        ]
        padded = [-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes]
        device = self.parameters[0].device
        self.memory = torch.zeros(sum(padded), dtype=dtype, device=device)
        blocks = self.memory.split(padded)
        self.copies = [
            block[: math.prod(shape)].view(shape)
            for block, shape in zip(blocks, shapes, strict=True)
        ]
        self._rows = [[len(one) for one in of_one] for of_one in pieces]
        linked = _Widen.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        linked[0].grad_fn._set_sequence_nr(_AT_ONCE)
        for linears in groups:
            linears[0].register_buffer("compute_bias", None, persistent=False)
            results: dict[int, torch.Tensor] = {}
            for number, one in enumerate(linears):
                vars(one).update(
                    number=number,
                    results=results,
                    sizes=[each.out_features for each in linears],
                )
                one.__class__ = Linear
        for (linears, name), copy in zip(owners, linked, strict=True):
            linears[0].register_buffer(f"compute_{name}", copy, persistent=False)

    def views(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's rows of tensors shaped as the copies."""
        pairs = zip(copies, self._rows, strict=True)
        return list(
            itertools.chain.from_iterable(copy.split(rows) for copy, rows in pairs)
        )


class _Widen(torch.autograd.Function):
    """Copies of weights as a function of the parameters, whose gradients it writes in fp32, all at once."""

    @staticmethod
    def forward(ctx: Any, link: _Link, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.link = link
        return tuple(copy.detach() for copy in link.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        link: _Link = ctx.link
        sizes = [one.numel() for one in link.parameters]
        blocks = torch.empty(
            sum(sizes), dtype=link.parameters[0].dtype, device=link.memory.device
        ).split(sizes)
        wide = [
            block.view_as(one)
            for block, one in zip(blocks, link.parameters, strict=True)
        ]
        torch._foreach_copy_(wide, link.views(gradients))
        return None, *wide


class Linear(nn.Linear):
    """Linear layer that computes with a working copy.

    The first of a group computes the results of all.
    """

    compute_weight: torch.Tensor
    compute_bias: torch.Tensor | None
    number: int
    results: dict[int, torch.Tensor]
    """Results that others of the group have not taken yet."""
    sizes: list[int]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, in bf16 under autocast."""
        if self.number:
            return self.results.pop(self.number)
        result = project(self, input)
        if len(self.sizes) == 1:
            return result
        parts: tuple[torch.Tensor, ...] = result.split(self.sizes, dim=-1)
        self.results.update(enumerate(parts[1:], 1))
        return parts[0]


def set_residual_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let all layer norms compute in fp32 and return ``dtype``, which the residual stream then has too."""
    for part in model.modules():
        if type(part) is nn.LayerNorm:
            part.__class__ = LayerNorm
            part.result_dtype = dtype  # type: ignore[assignment]


def keep_norms_in_bf16(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Let the layer norms of compiled layers keep their normalised input for backward in bf16, half of its bytes.

    Only the gradient is rounded, as that of matmuls is, whose inputs are kept in bf16.
    ``dtype`` is that of the result.
    """
    for layer in layers:
        set_residual_dtype(layer, dtype)
        for part in layer.modules():
            if isinstance(part, LayerNorm):
                part.keeps_bf16 = COMPILER_SAVES_COMPACT


class LayerNorm(nn.LayerNorm):
    """Layer norm that computes in fp32, whatever the dtypes of its input and weights."""

    result_dtype: torch.dtype
    keeps_bf16 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, of the same shape."""
        weight, bias = (
            None if one is None else one.float() for one in (self.weight, self.bias)
        )
        if self.keeps_bf16 and torch.is_grad_enabled():
            result: torch.Tensor = _Normalize.apply(
                input.float(), weight, bias, self.eps
            )  # type: ignore[no-untyped-call]
        else:
            result = functional.layer_norm(
                input.float(), self.normalized_shape, weight, bias, self.eps
            )
        return result.to(self.result_dtype)


class _Normalize(torch.autograd.Function):
    """Layer norm over the last dimension in fp32."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, eps: float
    ) -> torch.Tensor:
        variance, mean = torch.var_mean(input, -1, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        normal = (input - mean) * scale
        ctx.save_for_backward(normal.bfloat16(), scale, weight)
        ctx.has_bias = bias is not None
        result: torch.Tensor = normal if weight is None else normal * weight
        return result if bias is None else result + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, scale, weight = ctx.saved_tensors
        normal, (gradient,) = kept.float(), gradients
        tokens = tuple(range(gradient.dim() - 1))
        of_bias = gradient.sum(tokens) if ctx.has_bias else None
        of_weight = None if weight is None else (gradient * normal).sum(tokens)
        inner = gradient if weight is None else gradient * weight
        along = (inner * normal).mean(-1, keepdim=True)
        return (
            (inner - inner.mean(-1, keepdim=True) - normal * along) * scale,
            of_weight,
            of_bias,
            None,
        )
