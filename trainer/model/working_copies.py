"""Working copies: weights of linear layers in bf16, cast once per optimizer step.

Autocast casts every weight in every micro-batch, and every gradient back. Working
copies make that unnecessary. Parameters stay in fp32, for optimizer, checkpoints and
export. Linear layers of the same input, such as query, key and value, are computed in
one matmul.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

_SIBLINGS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names that transformers gives to linear layers of the same input, in the order of
their calls."""
_ALIGNED = 64
"""Multiple to which copies are padded, as kernels load aligned memory faster."""
_FIRST_IN_BACKWARD = 2**63 - 1
"""Largest sequence number of autograd, which computes nodes with larger ones first:
gradients of a part reach its parameters before other parts are computed."""


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
        self.memory: list[torch.Tensor] = []
        """Buffers that hold the copies, one for each part of the model."""
        self._copies: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        for part in _parts(model):
            groups = _computed_together(part, alone)
            if groups:
                link = _Link(groups, dtype)
                self.memory.append(link.memory)
                self._copies += link.split_by_parameter(link.copies)
                self._parameters += link.parameters
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all weights; call this after every change of them."""
        if self._copies:
            # One kernel for all. torch's foreach functions have no public names.
            torch._foreach_copy_(self._copies, self._parameters)


def compute_weights(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight and bias that a linear layer computes with.

    They are those of its group for the first layer of a group with working copies, and
    else the layer's own.
    """
    weight = getattr(linear, "compute_weight", linear.weight)
    bias = getattr(linear, "compute_bias", linear.bias)
    return weight, bias


def project(
    linear: nn.Linear, input: torch.Tensor, features: slice | None = None
) -> torch.Tensor:
    """Return the result of a linear layer, or only some of its output features.

    The first layer of a group with working copies computes the features of all.
    """
    weight, bias = compute_weights(linear)
    if features is not None:
        weight = weight[features]
        bias = None if bias is None else bias[features]
    matmul = getattr(linear, "float8_matmul", None)
    if matmul is None:
        return functional.linear(input, weight, bias)
    result: torch.Tensor = matmul(input.to(weight.dtype), weight)
    return result if bias is None else result + bias


class Linear(nn.Linear):
    """Linear layer that computes with a working copy.

    The first layer of a group computes the results of all. The others, which are called
    next and with the same input, take their results from it.
    """

    compute_weight: torch.Tensor
    """Copy of the weights of the group; only the first layer has it."""
    compute_bias: torch.Tensor | None
    """Copy of the biases of the group, if any; only the first layer has it."""
    number: int
    """Index of the layer in its group."""
    results: dict[int, torch.Tensor]
    """Results that others of the group have not taken yet, by their index; shared by
    the group."""
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


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, and then its encoder and the parts of its head.

    The encoder contains the layers.
    """
    parts: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            parts.extend(module)
    return [*parts, *model.children()]


def _computed_together(
    part: nn.Module, alone: Sequence[nn.Module]
) -> list[list[nn.Linear]]:
    """Return the trained linear layers of a part that have no working copy yet.

    Returns:
        Groups of layers with the same input.
    """
    linears = [
        module
        for module in part.modules()
        # Layers of earlier parts are of our class already.
        if type(module) is nn.Linear and module.weight.requires_grad
    ]
    groups: list[list[nn.Linear]] = []
    for module, names in itertools.product(part.modules(), _SIBLINGS):
        siblings = [getattr(module, name, None) for name in names]
        if all(sibling in linears for sibling in siblings):
            # If one of three siblings must be alone, the two others share a matmul.
            group: list[Any] = [sibling for sibling in siblings if sibling not in alone]
            if _can_share_matmul(group):
                groups.append(group)
    grouped = list(itertools.chain.from_iterable(groups))
    groups += [[linear] for linear in linears if linear not in grouped]
    return groups


def _can_share_matmul(linears: Sequence[nn.Linear]) -> bool:
    """Return True if input sizes match, and either all layers have a bias or none."""
    signatures = {(linear.in_features, linear.bias is None) for linear in linears}
    return len(signatures) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedParameters:
    """Weights, or biases, of linear layers that are computed together.

    They have one copy, with the output features of all layers.
    """

    first: nn.Linear
    """The layer that computes with the copy."""
    name: Literal["weight", "bias"]
    """Name of each of the parameters in its layer."""
    parameters: Sequence[torch.Tensor]
    """Parameters of this name, in the order of the layers."""

    @property
    def features(self) -> list[int]:
        """Output features of each layer."""
        return [len(parameter) for parameter in self.parameters]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the copy."""
        return (sum(self.features), *self.parameters[0].shape[1:])


def _join(groups: Sequence[Sequence[nn.Linear]]) -> list[_JoinedParameters]:
    """Return the weights of each group, and its biases if it has any."""
    names: tuple[Literal["weight", "bias"], ...] = ("weight", "bias")
    return [
        _JoinedParameters(
            first=linears[0],
            name=name,
            parameters=[getattr(linear, name) for linear in linears],
        )
        for linears, name in itertools.product(groups, names)
        if getattr(linears[0], name) is not None
    ]


class _Link:
    """Link of a part's working copies to its parameters.

    Args:
        groups: Linear layers that are computed together.
        dtype: Type of the copies.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Linear]], dtype: torch.dtype
    ) -> None:
        all_joined = _join(groups)
        self.parameters: list[torch.Tensor] = []
        for joined in all_joined:
            self.parameters += joined.parameters
        self._features = [joined.features for joined in all_joined]
        self._allocate([joined.shape for joined in all_joined], dtype)

        linked = _Widen.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        # Autograd has no public function for this.
        linked[0].grad_fn._set_sequence_nr(_FIRST_IN_BACKWARD)
        for linears in groups:
            # ``compute_bias`` exists on layers without a bias too.
            linears[0].register_buffer("compute_bias", None, persistent=False)
            _compute_with_first(linears)
        for joined, copy in zip(all_joined, linked, strict=True):
            joined.first.register_buffer(
                f"compute_{joined.name}", copy, persistent=False
            )

    def _allocate(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """Make copies of these shapes, which are views of one buffer."""
        sizes = [math.prod(shape) for shape in shapes]
        padded_sizes = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        self.memory = torch.zeros(
            sum(padded_sizes), dtype=dtype, device=self.parameters[0].device
        )
        blocks = self.memory.split(padded_sizes)
        self.copies = [
            block[:size].view(shape)
            for block, size, shape in zip(blocks, sizes, shapes, strict=True)
        ]

    def split_by_parameter(self, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's features of tensors shaped as the copies."""
        parts: list[torch.Tensor] = []
        for copy, features in zip(copies, self._features, strict=True):
            parts += copy.split(features)
        return parts


def _compute_with_first(linears: Sequence[nn.Linear]) -> None:
    """Let the first of these linear layers compute the results of all."""
    sizes = [linear.out_features for linear in linears]
    results: dict[int, torch.Tensor] = {}
    for number, linear in enumerate(linears):
        # The class is changed in place: the layer keeps its parameters, their names and
        # its place in the model.
        vars(linear).update(number=number, results=results, sizes=list(sizes))
        linear.__class__ = Linear


class _Widen(torch.autograd.Function):
    """Copies of weights as a function of the parameters.

    Backward casts the gradients of all copies to fp32 at once.
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
        torch._foreach_copy_(wide_gradients, link.split_by_parameter(gradients))
        return None, *wide_gradients
