"""What a rank holds where ranks share the state, on the meta device: ZeRO-1's optimizer, FSDP2's weights.

A trace has one rank, which would hold everything.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autotune.measure.jobs.tape import GRADIENTS, PARAMETERS, Tape
from trainer.build import Training

Part = list[nn.Parameter]


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

    Args:
        training: Its optimizer and step are given shards to update.
        layers: Parts of the model that are gathered one at a time.
        ranks: That share one copy of the weights.
        tape: Told what a rank holds.
    """

    def __init__(self, training: Training, layers: Sequence[nn.Module], ranks: int, tape: Tape) -> None:
        self._tape, self._module = tape, training.module
        self._layers = [(layer, _trained(layer.parameters())) for layer in layers]
        inside = {id(one) for _, part in self._layers for one in part}
        everything = _trained(training.module.parameters())
        self._rest = [one for one in everything if id(one) not in inside]
        self._whole: dict[int, list[torch.Tensor]] = {}
        self._is_backward = False
        self._left = 0
        self._missing: dict[int, int] = {}
        self._buffer: torch.Tensor | None = None
        tape.owner = PARAMETERS
        self._shards = {id(one): nn.Parameter(_shard_of(one, ranks)) for one in everything}
        tape.drop(everything)
        training.step.parameters = [self._shards[id(one)] for one in everything]
        for group in training.optimizer.param_groups:
            group["params"] = [self._shards[id(one)] for one in group["params"]]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Gather and release weights within the block."""
        handles: list[Any] = [self._module.register_forward_pre_hook(self.forward_begins)]
        for layer, part in self._layers:
            handles += [
                layer.register_forward_pre_hook(lambda _, __, part=part: self._gather(part)),
                layer.register_forward_hook(lambda _, __, output, part=part: self._computed(part, output)),
            ]
        for part in (self._rest, *(part for _, part in self._layers)):
            handles += [
                one.register_post_accumulate_grad_hook(lambda one, part=part: self._accumulated(part)) for one in part
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step_begins(self, micro_batches: int) -> None:
        """So many micro-batches follow, of which the last one sends its gradients."""
        self._left = micro_batches

    def forward_begins(self, *_: object) -> None:
        """A micro-batch begins, or an evaluation."""
        self._left -= 1
        self._is_backward = False
        self._gather(self._rest)

    def _gather(self, part: Part) -> None:
        if id(part) not in self._whole:
            owner, self._tape.owner = self._tape.owner, PARAMETERS
            # What the collective writes to; the one before is released when the next has been read.
            self._buffer = torch.empty(sum(one.numel() for one in part), device=part[0].device)
            self._whole[id(part)] = [torch.empty_like(one) for one in part]
            self._tape.owner = owner
            self._missing[id(part)] = len(part)

    def _computed(self, part: Part, output: Any) -> None:  # noqa: ANN401 - a tensor, or a tuple that begins with one
        if self._is_backward:  # computed again
            return
        del self._whole[id(part)]
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._goes_back(part))

    def _goes_back(self, part: Part) -> None:
        self._is_backward = True
        self._gather(part)

    def _accumulated(self, part: Part) -> None:
        self._missing[id(part)] -= 1
        if self._missing[id(part)]:
            return
        self._whole.pop(id(part), None)
        if not self._left:
            owner, self._tape.owner = self._tape.owner, GRADIENTS
            for one in part:
                shard = self._shards[id(one)]
                shard.grad, one.grad = torch.empty_like(shard), None
            self._tape.owner = owner


def _trained(parameters: Iterable[nn.Parameter]) -> Part:
    return [one for one in parameters if one.requires_grad]


def _shard_of(parameter: nn.Parameter, ranks: int) -> torch.Tensor:
    """A rank's share of the first dimension, rounded up."""
    return torch.empty((-(-parameter.shape[0] // ranks), *parameter.shape[1:]), device=parameter.device)
