"""Precision of compute: weights and residual stream in bf16, matmuls in float8.

Autocast casts every weight in every micro-batch, and every gradient back. Working
copies, cast once per optimizer step, make that unnecessary. Parameters stay in fp32,
for optimizer, checkpoints and export. Linear layers of the same input, such as query,
key and value, are computed in one matmul. Float8 matmuls are torchao's; they cast
working copies and inputs while they compute.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
_FIRST_IN_BACKWARD = 2**63 - 1
"""Priority of a link in backward: gradients of a part reach its parameters before other
parts are computed."""


class WorkingCopies:
    """Working copies of a model's linear layers, which compute with them.

    Args:
        model: The model.
        alone: Linear layers that are not computed with others.
        dtype: Type of the copies.
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
        links: list[_Link] = []
        for part in parts:
            groups = _computed_together(part, alone)
            if groups:
                links.append(_Link(groups, dtype))
        self.memory = [link.memory for link in links]
        self._copies: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        for link in links:
            self._copies += link.views(link.copies)
            self._parameters += link.parameters
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all weights; call this after every change of them."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._parameters)


def compute_weights(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight and bias that a linear layer computes with."""
    weight = getattr(linear, "compute_weight", linear.weight)
    bias = getattr(linear, "compute_bias", linear.bias)
    return weight, bias


def project(
    linear: nn.Linear, input: torch.Tensor, features: slice | None = None
) -> torch.Tensor:
    """Return a linear layer's result, or only some of its output features."""
    weight, bias = compute_weights(linear)
    if features is not None:
        weight = weight[features]
        bias = None if bias is None else bias[features]
    matmul = getattr(linear, "float8_matmul", None)
    if matmul is None:
        return functional.linear(input, weight, bias)
    result: torch.Tensor = matmul(input.to(weight.dtype), weight)
    return result if bias is None else result + bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of a setting."""

    is_fulfilled: bool
    reason: str
    """Reason why the setting cannot be used otherwise."""
    setting: str | None = None
    """Setting that fulfils the condition, as ``key=value``, if any."""


def check_float8(config: TrainConfig, device: torch.device, *, copies: bool) -> None:
    """Check that linear layers can compute in float8.

    Args:
        config: Configuration of the training.
        device: Device of the model.
        copies: True if linear layers have working copies.

    Raises:
        BadConfig: If they cannot, or torchao is not installed.
    """
    has_tensor_cores = config.device == "cuda"
    # A model that is traced without a GPU is on no device of type cuda.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        has_tensor_cores = False
    require(
        "float8=none",
        "torchao",
        "fp8",
        (
            Condition(
                is_fulfilled=has_tensor_cores,
                reason="requires float8 Tensor Cores: an Ada, Hopper or newer GPU",
            ),
            Condition(
                is_fulfilled=config.precision == "bf16",
                reason="requires bf16",
                setting="precision=bf16",
            ),
            Condition(
                is_fulfilled=config.compiled,
                reason="requires compiled layers, which fuse its casts",
                setting="compile=true",
            ),
            # fsdp2 gathers weights in bf16 itself, without working copies.
            Condition(
                is_fulfilled=config.parallel.strategy != "fsdp2",
                reason="cannot be used with fsdp2",
                setting="parallel.strategy=zero1",
            ),
            Condition(
                is_fulfilled=copies,
                reason=(
                    f"cannot be used with {config.model.config['model_type']!r}, which"
                    " has no working copies"
                ),
            ),
        ),
    )


def require(
    off: str, library: str, extra: str, conditions: Iterable[Condition]
) -> None:
    """Check that a setting can be used.

    Args:
        off: The setting that turns it off, as ``key=value``.
        library: Package that it needs.
        extra: Extra of this project that installs the package.
        conditions: Conditions that must be fulfilled.

    Raises:
        BadConfig: If one is not, or the package is not installed.
    """
    name = off.partition("=")[0]
    for condition in conditions:
        if not condition.is_fulfilled:
            settings = [condition.setting, off] if condition.setting else [off]
            options = " or ".join(f"--set train.{setting}" for setting in settings)
            raise BadConfig(
                f"train.{name} {condition.reason}", next_step=f"Use {options}"
            )
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

    Args:
        layers: Layers of the encoder.
        recipe: Name of the recipe.
        emulate: True to round only, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    # Converting a layer also replaces code of Inductor from which Triton generates
    # wrong stores of float8.
    any_layer = nn.Linear(_FLOAT8_MULTIPLE, _FLOAT8_MULTIPLE, device="meta")
    aligned, padded = (
        convert_to_float8_training(
            any_layer, config=replace(config, pad_inner_dim=is_padded)
        ).linear_mm_config
        for is_padded in (False, True)
    )

    def matmul(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The inner dimension of the weight gradient's matmul is the number of tokens.
        tokens = input.numel() // input.shape[-1]
        mm_config = padded if tokens % _FLOAT8_MULTIPLE else aligned
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(
            input, weight.t(), mm_config, config
        )
        return result

    for layer in layers:
        for part in layer.modules():
            if isinstance(part, Linear) and _fits_float8(part):
                vars(part)["float8_matmul"] = matmul


def _fits_float8(linear: "Linear") -> bool:
    """Return True if all dimensions of a layer's matmuls suit float8."""
    return not any(
        size % _FLOAT8_MULTIPLE for size in (linear.in_features, *linear.sizes)
    )


def _computed_together(
    part: nn.Module, alone: Sequence[nn.Module]
) -> list[list[nn.Linear]]:
    """Return the trained linear layers of a part, in groups of the same input."""
    linears = [
        module
        for module in part.modules()
        if type(module) is nn.Linear and module.weight.requires_grad
    ]
    groups: list[list[nn.Linear]] = []
    for module, names in itertools.product(part.modules(), _SIBLINGS):
        siblings = [getattr(module, name, None) for name in names]
        if all(sibling in linears for sibling in siblings):
            group: list[Any] = [sibling for sibling in siblings if sibling not in alone]
            # Input sizes must match, and either all have a bias or none.
            kinds = {(linear.in_features, linear.bias is None) for linear in group}
            if len(kinds) == 1:
                groups.append(group)
    grouped = list(itertools.chain(*groups))
    groups += [[linear] for linear in linears if linear not in grouped]
    return groups


class _Link:
    """Link of a part's working copies to its parameters.

    Args:
        groups: Linear layers that are computed together.
        dtype: Type of the copies.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Linear]], dtype: torch.dtype
    ) -> None:
        # A group has one copy of all weights, and one of all biases if it has any.
        owners = [
            (linears, name)
            for linears, name in itertools.product(groups, ("weight", "bias"))
            if getattr(linears[0], name) is not None
        ]
        pieces = [
            [getattr(linear, name) for linear in linears] for linears, name in owners
        ]
        self.parameters: list[torch.Tensor] = list(itertools.chain(*pieces))
        self._features = [[len(piece) for piece in group] for group in pieces]
        shapes = [
            (sum(features), *group[0].shape[1:])
            for group, features in zip(pieces, self._features, strict=True)
        ]
        # All copies are views of one buffer.
        padded_sizes = [-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes]
        device = self.parameters[0].device
        self.memory = torch.zeros(sum(padded_sizes), dtype=dtype, device=device)
        blocks = self.memory.split(padded_sizes)
        self.copies = [
            block[: math.prod(shape)].view(shape)
            for block, shape in zip(blocks, shapes, strict=True)
        ]
        linked = _Widen.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        linked[0].grad_fn._set_sequence_nr(_FIRST_IN_BACKWARD)
        for linears in groups:
            linears[0].register_buffer("compute_bias", None, persistent=False)
            _compute_with_first(linears)
        for (linears, name), copy in zip(owners, linked, strict=True):
            linears[0].register_buffer(f"compute_{name}", copy, persistent=False)

    def views(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's features of tensors shaped as the copies."""
        parts = (
            copy.split(features)
            for copy, features in zip(copies, self._features, strict=True)
        )
        return list(itertools.chain.from_iterable(parts))


def _compute_with_first(linears: Sequence[nn.Linear]) -> None:
    """Let the first of these linear layers compute the results of all."""
    sizes = [linear.out_features for linear in linears]
    results: dict[int, torch.Tensor] = {}
    for number, linear in enumerate(linears):
        vars(linear).update(number=number, results=results, sizes=list(sizes))
        linear.__class__ = Linear


class _Widen(torch.autograd.Function):
    """Copies of weights as a function of the parameters.

    Their gradients are written in fp32, all at once.
    """

    @staticmethod
    def forward(ctx: Any, link: _Link, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.link = link
        return tuple(copy.detach() for copy in link.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        link: _Link = ctx.link
        sizes = [parameter.numel() for parameter in link.parameters]
        blocks = torch.empty(
            sum(sizes), dtype=link.parameters[0].dtype, device=link.memory.device
        ).split(sizes)
        wide_gradients = [
            block.view_as(parameter)
            for block, parameter in zip(blocks, link.parameters, strict=True)
        ]
        torch._foreach_copy_(wide_gradients, link.views(gradients))
        return None, *wide_gradients


class Linear(nn.Linear):
    """Linear layer that computes with a working copy.

    The first of a group computes the results of all.
    """

    compute_weight: torch.Tensor
    compute_bias: torch.Tensor | None
    number: int
    """Index of the layer in its group."""
    results: dict[int, torch.Tensor]
    """Results that others of the group have not taken yet."""
    sizes: list[int]
    """Output features of each layer of the group."""

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
    """Let all layer norms compute in fp32 and return ``dtype``.

    The residual stream then has this type too.
    """
    for part in model.modules():
        if type(part) is nn.LayerNorm:
            part.__class__ = LayerNorm
            part.result_dtype = dtype  # type: ignore[assignment]


def keep_norms_in_bf16(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Let the layer norms of compiled layers keep bf16 for backward.

    It is their normalised input, of which that is half the bytes. Only the gradient is
    rounded, as that of matmuls is, whose inputs are kept in bf16.

    Args:
        layers: The compiled layers.
        dtype: Type of the result.
    """
    for layer in layers:
        set_residual_dtype(layer, dtype)
        for part in layer.modules():
            if isinstance(part, LayerNorm):
                part.keeps_bf16 = COMPILER_SAVES_COMPACT


class LayerNorm(nn.LayerNorm):
    """Layer norm that computes in fp32 for all dtypes of its input and weights."""

    result_dtype: torch.dtype
    keeps_bf16 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, of the same shape."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
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
        saved_normal, scale, weight = ctx.saved_tensors
        normal = saved_normal.float()
        (gradient,) = gradients
        all_but_last = tuple(range(gradient.dim() - 1))
        bias_gradient = gradient.sum(all_but_last) if ctx.has_bias else None
        weight_gradient = None
        if weight is not None:
            weight_gradient = (gradient * normal).sum(all_but_last)
        normal_gradient = gradient if weight is None else gradient * weight
        # Each element of the input also moves the spread and the mean.
        along = (normal_gradient * normal).mean(-1, keepdim=True)
        mean = normal_gradient.mean(-1, keepdim=True)
        return (
            (normal_gradient - mean - normal * along) * scale,
            weight_gradient,
            bias_gradient,
            None,
        )
