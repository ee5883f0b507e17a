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

from trainer.model.kernels.gelu_matmul import gelu_mlp

_SIBLINGS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names that transformers gives to linear layers of the same input, in the order of
their calls."""
_ALIGNED_ELEMENTS = 64
"""Multiple to which copies are padded, in elements, as kernels load aligned memory
faster."""
_FIRST_IN_BACKWARD = 2**63 - 1
"""Largest sequence number of autograd, which computes nodes with larger ones first:
gradients of a part reach its parameters before other parts are computed."""


class WorkingCopies:
    """Working copies of a model's linear layers, which compute with them.

    Args:
        model: The model.
        ungrouped: Linear layers that are computed alone, although their names say that
            they have the input of others.
        dtype: Type of the copies.
    """

    def __init__(
        self,
        model: nn.Module,
        ungrouped: Sequence[nn.Module] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.memory: list[torch.Tensor] = []
        """Buffers that hold the copies, one for each part of the model."""
        self._copies: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        for part in _parts(model):
            groups = _computed_together(part, ungrouped)
            if groups:
                linked = _LinkedCopies(groups, dtype)
                self.memory.append(linked.memory)
                self._copies += linked.split_by_parameter(linked.copies)
                self._parameters += linked.parameters
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
    linear: nn.Linear,
    input: torch.Tensor,
    features: slice | None = None,
    *,
    adds_bias: bool = True,
) -> torch.Tensor:
    """Return the result of a linear layer, or only some of its output features.

    The first layer of a group with working copies computes the features of all.
    """
    weight, bias = compute_weights(linear)
    if not adds_bias:
        bias = None
    if features is not None:
        weight = weight[features]
        bias = None if bias is None else bias[features]
    first_weights = getattr(linear, "first_weights", None)
    if first_weights is not None:
        # The linear layer after GELU computes the whole MLP.
        return gelu_mlp(
            input.to(weight.dtype),
            first_weights.pop("weight"),
            first_weights.pop("bias"),
            weight,
            bias,
        )
    matmul = getattr(linear, "float8_matmul", None)
    if matmul is None:
        return functional.linear(input, weight, bias)
    result: torch.Tensor = matmul(input.to(weight.dtype), weight)
    return result if bias is None else result + bias


def keep_joined(linear: nn.Module) -> None:
    """Let a layer keep the results of its group, if it is the first of a group.

    After each call, they must be taken with ``take_joined``.
    """
    linear.keeps_joined = True  # type: ignore[assignment]


def take_joined(linear: nn.Module | None) -> torch.Tensor | None:
    """Return the results of a group, joined as their matmul made them.

    Args:
        linear: First layer of the group, if there is one.

    Returns:
        The tensor that contains the results of all layers of the group, shape
        (…, features of all); None if the layer keeps none.
    """
    joined: list[torch.Tensor] = getattr(linear, "joined", [])
    return joined.pop() if joined else None


class Linear(nn.Linear):
    """Linear layer that computes with a working copy.

    The first layer of a group computes the results of all. The others, which are called
    next and with the same input, take their results from it.

    It has the name of torch's class, as memory breakdowns name activations by the class
    of their module.
    """

    compute_weight: torch.Tensor
    """Copy of the weights of the group; only the first layer has it."""
    compute_bias: torch.Tensor | None
    """Copy of the biases of the group, if any; only the first layer has it."""
    index_in_group: int
    """Index of the layer in its group; the first layer has 0."""
    results: dict[int, torch.Tensor]
    """Results that other layers of the group have not taken yet, by their index; all
    layers of a group share this table."""
    group_features: list[int]
    """Output features of each layer of the group."""
    keeps_joined: bool
    """True if the first layer also keeps the results of all, joined, for
    ``take_joined``."""
    joined: list[torch.Tensor]
    """Results of all layers, joined, until they are taken; at most one tensor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's result, in bf16 under autocast."""
        if self.index_in_group > 0:
            return self.results.pop(self.index_in_group)
        result = project(self, input)
        if len(self.group_features) == 1:
            return result
        if self.keeps_joined:
            self.joined.append(result)
        parts: tuple[torch.Tensor, ...] = result.split(self.group_features, dim=-1)
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
    part: nn.Module, ungrouped: Sequence[nn.Module]
) -> list[list[nn.Linear]]:
    """Return the trained linear layers of a part that have no working copy yet.

    Args:
        part: Part of the model.
        ungrouped: As in ``WorkingCopies``.

    Returns:
        Groups of layers that have the same input; a layer without siblings is a group
        of one.
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
            # If one of three siblings is ungrouped, the two others share a matmul.
            group: list[Any] = [
                sibling for sibling in siblings if sibling not in ungrouped
            ]
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

    first_layer: nn.Linear
    """First of the layers, which computes with the copy."""
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
            first_layer=linears[0],
            name=name,
            parameters=[getattr(linear, name) for linear in linears],
        )
        for linears, name in itertools.product(groups, names)
        if getattr(linears[0], name) is not None
    ]


class _LinkedCopies:
    """Working copies of a part of the model, through which gradients reach parameters.

    Layers get their copies as buffers when this is created.

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

        copies = _CopiesOfParameters.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        # Autograd has no public function for this.
        copies[0].grad_fn._set_sequence_nr(_FIRST_IN_BACKWARD)
        for linears in groups:
            # ``compute_bias`` exists on layers without a bias too.
            linears[0].register_buffer("compute_bias", None, persistent=False)
            _compute_with_first(linears)
        for joined, copy in zip(all_joined, copies, strict=True):
            joined.first_layer.register_buffer(
                f"compute_{joined.name}", copy, persistent=False
            )

    def _allocate(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        """Make copies of these shapes, which are views of one buffer."""
        sizes = [math.prod(shape) for shape in shapes]
        padded_sizes = [
            math.ceil(size / _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS for size in sizes
        ]
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
    group_features = [linear.out_features for linear in linears]
    results: dict[int, torch.Tensor] = {}
    for index, linear in enumerate(linears):
        # The class is changed in place: the layer keeps its parameters, their names and
        # its place in the model.
        linear.__class__ = Linear
        linear.index_in_group = index  # type: ignore[assignment]
        linear.results = results  # type: ignore[assignment]
        linear.group_features = list(group_features)  # type: ignore[assignment]
        linear.keeps_joined = False  # type: ignore[assignment]
        linear.joined = []  # type: ignore[assignment]


class _CopiesOfParameters(torch.autograd.Function):
    """Copies of weights, as a function of the parameters for autograd.

    Forward returns the copies, which ``WorkingCopies.refresh`` fills. Backward casts
    the gradients of all copies to fp32 at once.
    """

    @staticmethod
    def forward(
        ctx: Any, linked: _LinkedCopies, *_parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.linked = linked
        return tuple(copy.detach() for copy in linked.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linked: _LinkedCopies = ctx.linked
        sizes = [parameter.numel() for parameter in linked.parameters]
        blocks = torch.empty(
            sum(sizes), dtype=linked.parameters[0].dtype, device=linked.memory.device
        ).split(sizes)
        wide_gradients = [
            block.view_as(parameter)
            for block, parameter in zip(blocks, linked.parameters, strict=True)
        ]
        torch._foreach_copy_(wide_gradients, linked.split_by_parameter(gradients))
        return None, *wide_gradients
