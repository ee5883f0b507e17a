"""FSDP2 on one rank, for a trace: shards of the weights, gathered when needed.

A trace has a single rank, which would hold everything and send nothing, so this
replaces torch's implementation.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term
from trainer.build import Training

# CUDA streams: gathered and received blocks are kept separate from computed ones.
_COMPUTING = 0
_GATHERING = 1
_SENDING = 2


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """Parameters that FSDP2 gathers together: those of a layer, or all outside."""

    parameters: list[nn.Parameter]
    whole: list[torch.Tensor] | None = None
    """Whole weights while they are needed."""


class Shards:
    """FSDP2 on one rank: weights are sharded, and whole only while they are needed.

    Weights of a layer are whole while it runs, those outside of layers for a whole
    micro-batch. Backward prefetches the weights of the next layer that it needs, and
    copies a layer's gradients into one block to send them. Until then, gradients of
    micro-batches add up in the dtype in which they are sent.

    Args:
        training: Training whose optimizer and step are made to update shards.
        layers: Layers in the order of forward.
        ranks: Ranks that share one copy of the weights.
        recorder: Recorder of the allocations.
        bf16: True if layers gather their weights in bf16.
        sent: dtype in which gradients are sent.
    """

    def __init__(
        self,
        training: Training,
        layers: Sequence[nn.Module],
        ranks: int,
        recorder: AllocationRecorder,
        *,
        bf16: bool,
        sent: torch.dtype,
    ) -> None:
        self._recorder = recorder
        self._module = training.module
        self._ranks = ranks
        self._sent_dtype = sent
        self._layers = layers
        self._units = [
            _Unit(parameters=_trained(layer.parameters())) for layer in layers
        ]
        """Parameters of each layer."""
        everything = _trained(training.module.parameters())
        in_layers = {
            id(parameter) for unit in self._units for parameter in unit.parameters
        }
        self._rest = _Unit(
            parameters=[
                parameter for parameter in everything if id(parameter) not in in_layers
            ]
        )
        """Parameters outside of layers."""
        self._sums: dict[int, torch.Tensor] = {}
        """Gradients of earlier micro-batches, if they are sent in another dtype than
        they are computed in."""
        self._is_backward = False
        self._micro_batches_to_come = 0
        self._missing = 0
        """Gradients outside of layers that backward has not computed yet."""
        self._gathered: torch.Tensor | None = None
        """Output block of the last all-gather, from which weights are copied."""
        self._sent: torch.Tensor | None = None
        """Block from which gradients were sent last."""
        self._shards: dict[int, nn.Parameter] = {}
        self._shard_weights()
        if bf16:
            self._lower_layers()
        training.step.parameters = self._shards_of(everything)
        for group in training.optimizer.param_groups:
            group["params"] = self._shards_of(group["params"])

    def _shard_weights(self) -> None:
        """Replace the blocks of whole weights by those of shards."""
        self._recorder.owner = Term.PARAMETERS
        for unit in (*self._units, self._rest):
            for parameter in unit.parameters:
                self._shards[id(parameter)] = _empty_shard(parameter, self._ranks)
            self._recorder.drop(unit.parameters)

    def _lower_layers(self) -> None:
        """Convert the layers' weights to bf16, the dtype in which they are gathered."""
        with self._recorder.paused():
            for unit in self._units:
                for parameter in unit.parameters:
                    parameter.data = parameter.data.bfloat16()

    def _shards_of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [self._shards[id(parameter)] for parameter in parameters]

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Gather and release weights until the hooks are removed."""
        module, enter = self._module, hooks.enter_context

        def forward_ended(_: nn.Module, __: object, loss: torch.Tensor) -> None:
            _before_backward(loss, self._backward_begins)

        enter(module.register_forward_pre_hook(self.forward_begins))
        enter(module.register_forward_hook(forward_ended))
        for number, layer in enumerate(self._layers):
            layer_begins = functools.partial(self._layer_begins, self._units[number])
            layer_ended = functools.partial(self._layer_ended, number)
            enter(layer.register_forward_pre_hook(layer_begins))
            enter(layer.register_forward_hook(layer_ended))
        for parameter in self._rest.parameters:
            enter(parameter.register_post_accumulate_grad_hook(self._accumulated))

    # Steps, micro-batches and evaluations.

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step, of which the last micro-batch sends its gradients."""
        self._micro_batches_to_come = micro_batches

    def forward_begins(self, *_: object) -> None:
        """Gather the weights outside of layers for a micro-batch or an evaluation."""
        self._micro_batches_to_come -= 1
        self._is_backward = False
        self._need(self._rest)

    def evaluation_ended(self) -> None:
        """Release the weights that an evaluation gathered."""
        self._gathered = None
        self._rest.whole = None

    # Forward.

    def _layer_begins(self, unit: _Unit, _: nn.Module, arguments: Any) -> Any:
        self._need(unit)
        if not self._is_backward and arguments[0].requires_grad:
            first = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._went_back(unit), arguments[0]
            )
            return (first, *arguments[1:])
        return None

    def _layer_ended(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        # A recomputation in backward leaves the weights whole.
        if self._is_backward:
            return
        self._units[number].whole = None
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        _before_backward(tensor, lambda: self._goes_back(number))

    # All-gathers of weights.

    def _need(self, unit: _Unit) -> None:
        """Gather weights, unless they are whole."""
        if unit.whole is None:
            # The block of the last gather is released when this one has been written.
            self._gather(unit)
            self._make_whole(unit)

    def _gather(self, unit: _Unit) -> None:
        """Record the blocks of an all-gather of some parameters."""
        elements = self._elements(unit)
        dtype = unit.parameters[0].dtype
        # The shard in the dtype of the layer, which is sent.
        narrow = None
        if dtype != torch.float32:
            narrow = self._empty(elements, Term.PARAMETERS, _GATHERING, dtype)
        self._gathered = self._empty(
            elements * self._ranks, Term.PARAMETERS, _GATHERING, dtype
        )
        del narrow

    def _gather_ahead(self, number: int) -> None:
        """Gather the weights of a layer before backward needs them, if there is one."""
        self._gathered = None
        if number >= 0:
            self._gather(self._units[number])

    def _make_whole(self, unit: _Unit) -> None:
        """Copy weights out of the block that was gathered."""
        with self._recorder.owned_by(Term.PARAMETERS):
            unit.whole = [torch.empty_like(parameter) for parameter in unit.parameters]

    # Backward.

    def _backward_begins(self) -> None:
        self._is_backward = True
        self._missing = len(self._rest.parameters)
        self._gather_ahead(len(self._units) - 1)

    def _goes_back(self, number: int) -> None:
        """Begin the backward of a layer, whose weights are gathered already."""
        self._make_whole(self._units[number])
        self._gather_ahead(number - 1)

    def _accumulated(self, _: nn.Parameter) -> None:
        self._missing -= 1
        if not self._missing:
            self._went_back(self._rest)

    def _went_back(self, unit: _Unit) -> None:
        """End the backward of some parameters: add up or send their gradients."""
        for parameter in unit.parameters:
            if id(parameter) in self._sums:
                # The sum of earlier micro-batches has taken it up.
                parameter.grad = None
        unit.whole = None
        if self._micro_batches_to_come:
            self._keep_sums(unit)
        else:
            self._send(unit)

    def _keep_sums(self, unit: _Unit) -> None:
        """Keep gradients for the next micro-batch, in the dtype that is sent."""
        for parameter in unit.parameters:
            if parameter.grad is None or parameter.grad.dtype == self._sent_dtype:
                continue
            with self._recorder.owned_by(Term.GRADIENTS):
                self._sums[id(parameter)] = parameter.grad.to(self._sent_dtype)
            parameter.grad = None

    def _send(self, unit: _Unit) -> None:
        """Copy gradients into one block, send it, and keep this rank's shard."""
        elements = self._elements(unit)
        # The block of the last unit is free before the next one is made.
        self._sent = None
        self._sent = self._empty(
            elements * self._ranks, Term.GRADIENTS, _COMPUTING, self._sent_dtype
        )
        for parameter in unit.parameters:
            parameter.grad = None
            self._sums.pop(id(parameter), None)
        received = self._empty(elements, Term.GRADIENTS, _SENDING, self._sent_dtype)
        with self._recorder.owned_by(Term.GRADIENTS, _SENDING):
            received = received.float()
        shards = self._shards_of(unit.parameters)
        gradients = received.split([shard.numel() for shard in shards])
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient.view_as(shard)
        if unit is self._rest:
            self._sent = None

    def _elements(self, unit: _Unit) -> int:
        """Return the number of elements that a rank holds of some parameters."""
        return sum(shard.numel() for shard in self._shards_of(unit.parameters))

    def _empty(
        self, elements: int, owner: str, stream: int, dtype: torch.dtype
    ) -> torch.Tensor:
        with self._recorder.owned_by(owner, stream):
            device = self._rest.parameters[0].device
            return torch.empty(elements, dtype=dtype, device=device)


def _empty_shard(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """Return a rank's share of the first dimension, rounded up."""
    length, *others = parameter.shape
    return nn.Parameter(
        torch.empty((-(-length // ranks), *others), device=parameter.device)
    )


class _AfterBackward(torch.autograd.Function):
    """Input of a layer; its gradient ends the layer's backward."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[[], None], tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.call()
        return None, gradients[0]


def _before_backward(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda _: call())


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
