"""What a rank holds where ranks share the state, on the meta device: ZeRO-1's optimizer, FSDP2's weights.

A trace has one rank, which would hold everything.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autotune.core.allocations import Term
from autotune.measure.jobs.tape import Tape
from trainer.build import Training

Part = list[nn.Parameter]
_COMPUTING, _GATHERING, _SENDING = 0, 1, 2
"""Streams: what is gathered and what is received lies apart from what is computed."""


def keep_largest_part(optimizer: torch.optim.Optimizer, ranks: int, *, keeps_gradients: bool) -> None:
    """Leave an optimizer the parameters of the rank that has the most of them under ZeRO-1.

    Each goes to the rank that has the fewest numbers so far, the largest first, as ``ZeroRedundancyOptimizer`` deals.
    """
    held = [0] * ranks
    owners: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
            owners[id(parameter)] = rank = held.index(min(held))
            held[rank] += parameter.numel()
    most = held.index(max(held))
    everything = [one for group in optimizer.param_groups for one in group["params"]]

    def no_gradients(*_: object) -> None:
        for one in everything:
            one.grad = None

    if not keeps_gradients:
        optimizer.register_step_post_hook(no_gradients)  # its own zero_grad knows its part alone
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if owners[id(one)] == most]


class Shards:
    """FSDP2 on one rank: a layer's weights are whole while it computes, and all others' while a micro-batch does.

    Backward gathers each layer's weights while the one before it computes, and copies a layer's gradients into one
    block to send them.

    Args:
        training: Its optimizer and step are given shards to update.
        layers: Parts of the model that are gathered one at a time.
        ranks: That share one copy of the weights.
        tape: Told what a rank holds.
    """

    def __init__(self, training: Training, layers: Sequence[nn.Module], ranks: int, tape: Tape) -> None:
        self._tape, self._module, self._ranks = tape, training.module, ranks
        self._layers = [(layer, _trained(layer.parameters())) for layer in layers]
        inside = {id(one) for _, part in self._layers for one in part}
        everything = _trained(training.module.parameters())
        self._rest = [one for one in everything if id(one) not in inside]
        self._whole: dict[int, list[torch.Tensor]] = {}
        self._is_backward = False
        self._left = 0
        self._missing = 0
        """Gradients of what is in no layer, until backward has ended."""
        self._gathered: torch.Tensor | None = None
        """Output block of the last all-gather, from which weights are copied."""
        self._sent: torch.Tensor | None = None
        tape.owner = Term.PARAMETERS
        self._shards = {id(one): nn.Parameter(_shard_of(one, ranks)) for one in everything}
        tape.drop(everything)
        training.step.parameters = [self._shards[id(one)] for one in everything]
        for group in training.optimizer.param_groups:
            group["params"] = [self._shards[id(one)] for one in group["params"]]

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Gather and release weights until the hooks are removed."""
        module, keep = self._module, hooks.enter_context
        keep(module.register_forward_pre_hook(self.forward_begins))
        keep(module.register_forward_hook(lambda _, __, loss: _before_backward(loss, self._backward_begins)))
        for number, (layer, part) in enumerate(self._layers):
            keep(layer.register_forward_pre_hook(functools.partial(self._begins, part)))
            keep(layer.register_forward_hook(functools.partial(self._computed, number)))
        for one in self._rest:
            keep(one.register_post_accumulate_grad_hook(self._accumulated))

    def step_begins(self, micro_batches: int) -> None:
        """So many micro-batches follow, of which the last one sends its gradients."""
        self._left = micro_batches

    def forward_begins(self, *_: object) -> None:
        """A micro-batch begins, or an evaluation."""
        self._left -= 1
        self._is_backward = False
        self._needed(self._rest)

    def evaluation_ended(self) -> None:
        """Release what an evaluation gathered."""
        self._gathered = None
        self._whole.pop(id(self._rest), None)

    def _begins(self, part: Part, _: nn.Module, given: Any) -> Any:  # noqa: ANN401 - a layer's arguments
        self._needed(part)
        if not self._is_backward and given[0].requires_grad:
            return (_AfterBackward.apply(lambda: self._went_back(part), given[0]), *given[1:])  # type: ignore[no-untyped-call]
        return None

    def _needed(self, part: Part) -> None:
        """Gather weights, unless they are whole."""
        if id(part) not in self._whole:
            # The block of the last gather is released when this one has been written.
            self._gathered = self._made(self._size(part) * self._ranks, Term.PARAMETERS, _GATHERING)
            self._make_whole(part)

    def _make_whole(self, part: Part) -> None:
        owner, self._tape.owner = self._tape.owner, Term.PARAMETERS
        self._whole[id(part)] = [torch.empty_like(one) for one in part]
        self._tape.owner = owner

    def _computed(self, number: int, _: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401 - a layer's result
        if self._is_backward:  # computed again
            return
        del self._whole[id(self._layers[number][1])]
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        _before_backward(tensor, lambda: self._goes_back(number))

    def _backward_begins(self) -> None:
        self._is_backward = True
        self._missing = len(self._rest)
        self._gather_ahead(len(self._layers) - 1)

    def _goes_back(self, number: int) -> None:
        self._make_whole(self._layers[number][1])
        self._gather_ahead(number - 1)

    def _gather_ahead(self, number: int) -> None:
        self._gathered = None
        if number >= 0:
            self._gathered = self._made(self._size(self._layers[number][1]) * self._ranks, Term.PARAMETERS, _GATHERING)

    def _accumulated(self, _: nn.Parameter) -> None:
        self._missing -= 1
        if not self._missing:
            self._went_back(self._rest)

    def _went_back(self, part: Part) -> None:
        self._whole.pop(id(part), None)
        if self._left:
            return
        self._sent = None
        self._sent = self._made(self._size(part) * self._ranks, Term.GRADIENTS, _COMPUTING)
        for one in part:
            one.grad = None
        received = self._made(self._size(part), Term.GRADIENTS, _SENDING)
        offset = 0
        for one in part:
            shard = self._shards[id(one)]
            shard.grad = received[offset : offset + shard.numel()].view_as(shard)
            offset += shard.numel()
        if part is self._rest:
            self._sent = None

    def _size(self, part: Part) -> int:
        """Numbers that a rank holds of some parameters."""
        return sum(self._shards[id(one)].numel() for one in part)

    def _made(self, numbers: int, owner: str, stream: int) -> torch.Tensor:
        before, self._tape.owner, self._tape.stream = self._tape.owner, owner, stream
        made = torch.empty(numbers, device=self._rest[0].device)
        self._tape.owner, self._tape.stream = before, _COMPUTING
        return made


class _AfterBackward(torch.autograd.Function):
    """An input of a layer, whose gradient ends the layer's backward."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's own
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ANN401 - torch's own
        ctx.call()
        return None, gradients[0]


def _before_backward(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda _: call())


def _trained(parameters: Iterable[nn.Parameter]) -> Part:
    return [one for one in parameters if one.requires_grad]


def _shard_of(parameter: nn.Parameter, ranks: int) -> torch.Tensor:
    """A rank's share of the first dimension, rounded up."""
    return torch.empty((-(-parameter.shape[0] // ranks), *parameter.shape[1:]), device=parameter.device)
