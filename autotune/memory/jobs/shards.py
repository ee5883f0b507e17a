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

from autotune.memory.decide.rounding import ceil_divide
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term

_COMPUTE_STREAM = 0
"""CUDA stream of the model. Torch reuses a freed block on its own stream only."""
_GATHER_STREAM = 1
"""CUDA stream of all-gathers of weights."""
_REDUCE_STREAM = 2
"""CUDA stream of reduce-scatters of gradients."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Unit:
    """Parameters that FSDP2 gathers together.

    They are those of a layer, or all parameters outside of layers.
    """

    parameters: list[nn.Parameter]
    """Trained parameters. Their own blocks are released: shards hold their state."""
    whole_weights: list[torch.Tensor] | None = None
    """Blocks of the whole weights, which exist while they are needed."""


class Shards:
    """FSDP2 on one rank: weights are sharded, and whole only while they are needed.

    The weights of a layer are whole while the layer runs; the weights outside of layers
    are whole for an entire micro-batch. Backward gathers the weights of the next layer
    ahead. In the last micro-batch it copies the gradients of a layer into one block and
    sends that; in earlier ones they add up in the dtype in which they are sent.

    Args:
        module: Module whose weights are sharded.
        optimizer: Its optimizer, which is made to update shards.
        layers: Layers in the order of forward.
        ranks: Ranks that share one copy of the weights.
        recorder: Recorder of the allocations.
        bf16: True if layers gather their weights in bf16.
        sent_dtype: dtype in which gradients are sent.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[nn.Module],
        ranks: int,
        recorder: AllocationRecorder,
        *,
        bf16: bool,
        sent_dtype: torch.dtype,
    ) -> None:
        self._recorder = recorder
        self._module = module
        self._ranks = ranks
        self._sent_dtype = sent_dtype
        self._layers = layers
        self._units = [
            _Unit(parameters=_trained(layer.parameters())) for layer in layers
        ]
        """Unit of each layer."""
        everything = _trained(module.parameters())
        in_layers = {
            id(parameter) for unit in self._units for parameter in unit.parameters
        }
        self._outside = _Unit(
            parameters=[
                parameter for parameter in everything if id(parameter) not in in_layers
            ]
        )
        """Unit of the parameters outside of layers."""
        self._gradient_sums: dict[int, torch.Tensor] = {}
        """Sum of the gradients of earlier micro-batches, by identity of the parameter,
        if gradients are sent in another dtype than they are computed in."""
        self._is_backward = False
        """True from the beginning of a backward to that of the next forward."""
        self._micro_batches_to_come = 0
        """Micro-batches of the step whose forward has not begun; 0 during the last."""
        self._missing_gradients = 0
        """Number of gradients outside of layers that backward has not computed yet."""
        self._gather_block: torch.Tensor | None = None
        """Result of the last all-gather, out of which weights are copied."""
        self._send_block: torch.Tensor | None = None
        """Block from which gradients were sent last."""
        self._shards: dict[int, nn.Parameter] = {}
        """Shard of each parameter, by identity of the parameter."""
        self._shard_weights()
        if bf16:
            self._cast_layers_to_bf16()
        self.parameters = self._shards_of(everything)
        """Shards of all trained parameters, which take their place in a step."""
        for group in optimizer.param_groups:
            group["params"] = self._shards_of(group["params"])

    def _shard_weights(self) -> None:
        """Replace the blocks of whole weights by those of shards."""
        self._recorder.owner = Term.PARAMETERS
        for unit in (*self._units, self._outside):
            for parameter in unit.parameters:
                self._shards[id(parameter)] = _empty_shard(parameter, self._ranks)
            self._recorder.record_release(unit.parameters)

    def _cast_layers_to_bf16(self) -> None:
        """Cast the layers' weights to bf16, the dtype in which they are gathered.

        The cast is not recorded: the blocks of whole weights are released already.
        """
        with self._recorder.paused():
            for unit in self._units:
                for parameter in unit.parameters:
                    parameter.data = parameter.data.bfloat16()

    def _shards_of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return this rank's shards of some parameters."""
        return [self._shards[id(parameter)] for parameter in parameters]

    def register_hooks(self, hooks: contextlib.ExitStack) -> None:
        """Gather and release weights until the hooks are removed.

        The hooks of the module and of its layers call the methods below, in the order
        in which forward and backward reach them.
        """
        module = self._module
        enter = hooks.enter_context

        def forward_ended(_: nn.Module, __: object, loss: torch.Tensor) -> None:
            _call_before_backward(loss, self._backward_begins)

        enter(module.register_forward_pre_hook(self.forward_begins))
        enter(module.register_forward_hook(forward_ended))
        for number, layer in enumerate(self._layers):
            layer_begins = functools.partial(self._layer_begins, self._units[number])
            layer_ended = functools.partial(self._layer_ended, number)
            enter(layer.register_forward_pre_hook(layer_begins))
            enter(layer.register_forward_hook(layer_ended))
        for parameter in self._outside.parameters:
            enter(
                parameter.register_post_accumulate_grad_hook(self._gradient_accumulated)
            )

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step, of which the last micro-batch sends its gradients."""
        self._micro_batches_to_come = micro_batches

    def forward_begins(self, *_: object) -> None:
        """Gather the weights outside of layers for a micro-batch or an evaluation."""
        self._micro_batches_to_come -= 1
        self._is_backward = False
        self._gather_if_sharded(self._outside)

    def evaluation_ended(self) -> None:
        """Release the weights that an evaluation gathered."""
        self._gather_block = None
        self._outside.whole_weights = None

    def _layer_begins(self, unit: _Unit, _: nn.Module, arguments: Any) -> Any:
        """Gather the weights of a layer before its forward.

        Returns:
            Arguments whose first one calls ``_unit_backward_ended`` once backward has
            computed its gradient, the last one of the layer; None leaves the arguments
            as they are.
        """
        self._gather_if_sharded(unit)
        if not self._is_backward and arguments[0].requires_grad:
            first = _CallAfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._unit_backward_ended(unit), arguments[0]
            )
            return (first, *arguments[1:])
        return None

    def _layer_ended(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        """Release the weights of a layer after its forward.

        A recomputation in backward leaves them whole.
        """
        if self._is_backward:
            return
        self._units[number].whole_weights = None
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        _call_before_backward(tensor, lambda: self._layer_backward_begins(number))

    def _gather_if_sharded(self, unit: _Unit) -> None:
        """Gather the weights of a unit, unless they are whole."""
        if unit.whole_weights is None:
            # The block of the last gather is released after this one's is allocated.
            self._gather(unit)
            self._copy_out(unit)

    def _gather(self, unit: _Unit) -> None:
        """Record the blocks of an all-gather of a unit's weights."""
        elements = self._elements(unit)
        dtype = unit.parameters[0].dtype
        # An fp32 shard is sent as it is, others from a copy in the dtype of the layer.
        cast_shard = None
        if dtype != torch.float32:
            cast_shard = self._empty(elements, Term.PARAMETERS, _GATHER_STREAM, dtype)
        self._gather_block = self._empty(
            elements * self._ranks, Term.PARAMETERS, _GATHER_STREAM, dtype
        )
        del cast_shard

    def _gather_ahead(self, number: int) -> None:
        """Gather the weights of a layer before backward needs them.

        Args:
            number: Number of the layer in forward; nothing is gathered if it is -1.
        """
        self._gather_block = None
        if number >= 0:
            self._gather(self._units[number])

    def _copy_out(self, unit: _Unit) -> None:
        """Record the blocks into which a unit's gathered weights are copied."""
        with self._recorder.owned_by(Term.PARAMETERS):
            unit.whole_weights = [
                torch.empty_like(parameter) for parameter in unit.parameters
            ]

    def _backward_begins(self) -> None:
        """Begin the backward of a micro-batch, whose last layer is needed first."""
        self._is_backward = True
        self._missing_gradients = len(self._outside.parameters)
        self._gather_ahead(len(self._units) - 1)

    def _layer_backward_begins(self, number: int) -> None:
        """Begin the backward of a layer, whose weights are gathered already."""
        self._copy_out(self._units[number])
        self._gather_ahead(number - 1)

    def _gradient_accumulated(self, _: nn.Parameter) -> None:
        """Count a gradient outside of layers; the last one ends their backward."""
        self._missing_gradients -= 1
        if not self._missing_gradients:
            self._unit_backward_ended(self._outside)

    def _unit_backward_ended(self, unit: _Unit) -> None:
        """End the backward of a unit: add up its gradients, or send them."""
        for parameter in unit.parameters:
            if id(parameter) in self._gradient_sums:
                # From here on, the sum of earlier micro-batches includes it.
                parameter.grad = None
        unit.whole_weights = None
        if self._micro_batches_to_come:
            self._keep_sums(unit)
        else:
            self._send(unit)

    def _keep_sums(self, unit: _Unit) -> None:
        """Keep a unit's gradients for the next micro-batch, in the dtype of sending."""
        for parameter in unit.parameters:
            if parameter.grad is None or parameter.grad.dtype == self._sent_dtype:
                continue
            with self._recorder.owned_by(Term.GRADIENTS):
                self._gradient_sums[id(parameter)] = parameter.grad.to(self._sent_dtype)
            parameter.grad = None

    def _send(self, unit: _Unit) -> None:
        """Copy a unit's gradients into one block, send it, and keep a rank's shard."""
        elements = self._elements(unit)
        # The block of the unit before is released before the next one is allocated.
        self._send_block = None
        self._send_block = self._empty(
            elements * self._ranks, Term.GRADIENTS, _COMPUTE_STREAM, self._sent_dtype
        )
        for parameter in unit.parameters:
            parameter.grad = None
            self._gradient_sums.pop(id(parameter), None)
        received = self._empty(
            elements, Term.GRADIENTS, _REDUCE_STREAM, self._sent_dtype
        )
        with self._recorder.owned_by(Term.GRADIENTS, _REDUCE_STREAM):
            received = received.float()
        shards = self._shards_of(unit.parameters)
        gradients = received.split([shard.numel() for shard in shards])
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient.view_as(shard)
        if unit is self._outside:
            self._send_block = None

    def _elements(self, unit: _Unit) -> int:
        """Return the number of elements that a rank holds of a unit's parameters."""
        return sum(shard.numel() for shard in self._shards_of(unit.parameters))

    def _empty(
        self, elements: int, owner: str, stream: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a new block, which the recorder notes with its owner and stream."""
        with self._recorder.owned_by(owner, stream):
            device = self._outside.parameters[0].device
            return torch.empty(elements, dtype=dtype, device=device)


def _empty_shard(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """Return a rank's share of the first dimension, rounded up."""
    length, *others = parameter.shape
    return nn.Parameter(
        torch.empty((ceil_divide(length, ranks), *others), device=parameter.device)
    )


class _CallAfterBackward(torch.autograd.Function):
    """Identity that calls a function when backward has computed its gradient.

    It is applied to a layer's input, whose gradient is the layer's last.
    """

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


def _call_before_backward(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    """Call a function when backward reaches a tensor, before its own backward."""
    if tensor.requires_grad:
        tensor.register_hook(lambda _: call())


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in parameters if parameter.requires_grad]
