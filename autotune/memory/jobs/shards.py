"""Memory of one of several ranks, on the meta device: DDP's gradient buckets, ZeRO-1's optimizer, FSDP2's weights.

A trace has a single rank, which would hold everything and send nothing, so these
replace torch's implementations.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autotune.memory.decide.batch_search import MIB
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term
from trainer.build import Training
from trainer.config.train_config import TrainConfig
from trainer.distributed.parallel import TORCHS_BUCKET_CAP_MIB

Part = list[nn.Parameter]
_COMPUTING, _GATHERING, _SENDING = 0, 1, 2
"""CUDA streams: gathered and received blocks are kept separate from computed ones."""
_FIRST_BUCKET_BYTES = MIB
_BROADCAST_BYTES = 250 * MIB
"""Size of the pieces in which DDP sends the first weights; two of them exist at a
time."""


def keep_largest_part(
    optimizer: torch.optim.Optimizer, ranks: int, *, keeps_gradients: bool
) -> None:
    """Leave an optimizer the parameters of the rank that has the most of them under ZeRO-1.

    As in ``ZeroRedundancyOptimizer``, each, the largest first, goes to the rank that
    has the fewest elements so far.
    """
    held = [0] * ranks
    owners: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
            owners[id(parameter)] = rank = held.index(min(held))
            held[rank] += parameter.numel()
    everything = [one for group in optimizer.param_groups for one in group["params"]]

    def no_gradients(*_: object) -> None:
        for one in everything:
            one.grad = None

    if not keeps_gradients:
        # Its own zero_grad knows its part alone.
        optimizer.register_step_post_hook(no_gradients)
    most = held.index(max(held))
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if owners[id(one)] == most]


class Shards:
    """FSDP2 on one rank: weights of a layer are whole while it runs, those outside of layers for a whole micro-batch.

    Backward prefetches the weights of the next layer that it needs, and copies a
    layer's gradients into one block to send them; until then, gradients of
    micro-batches add up in the dtype in which they are sent. The training's optimizer
    and step update shards; ``ranks`` share one copy of the weights.
    """

    def __init__(
        self,
        training: Training,
        layers: Sequence[nn.Module],
        ranks: int,
        tape: AllocationRecorder,
        *,
        bf16: bool,
        sent: torch.dtype,
    ) -> None:
        self._tape, self._module, self._ranks, self._sent_dtype = (
            tape,
            training.module,
            ranks,
            sent,
        )
        self._layers = [(layer, _trained(layer.parameters())) for layer in layers]
        inside = {id(one) for _, part in self._layers for one in part}
        everything = _trained(training.module.parameters())
        self._rest = [one for one in everything if id(one) not in inside]
        self._whole: dict[int, list[torch.Tensor]] = {}
        self._sums: dict[int, torch.Tensor] = {}
        """Gradients of earlier micro-batches, if they are sent in another dtype than
        they are computed in."""
        self._is_backward = False
        self._left = 0
        self._missing = 0
        """Gradients outside of layers that backward has not computed yet."""
        self._gathered: torch.Tensor | None = None
        """Output block of the last all-gather, from which weights are copied."""
        self._sent: torch.Tensor | None = None
        tape.owner = Term.PARAMETERS
        self._shards: dict[int, nn.Parameter] = {}
        for part in (*(part for _, part in self._layers), self._rest):
            # A rank's share of the first dimension, rounded up.
            self._shards |= {
                id(one): nn.Parameter(
                    torch.empty(
                        (-(-one.shape[0] // ranks), *one.shape[1:]), device=one.device
                    )
                )
                for one in part
            }
            tape.drop(part)
        if bf16:
            with tape.paused():  # gathered in bf16
                for one in (one for _, part in self._layers for one in part):
                    one.data = one.data.bfloat16()
        training.step.parameters = [self._shards[id(one)] for one in everything]
        for group in training.optimizer.param_groups:
            group["params"] = [self._shards[id(one)] for one in group["params"]]

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Gather and release weights until the hooks are removed."""
        module, keep = self._module, hooks.enter_context
        keep(module.register_forward_pre_hook(self.forward_begins))
        keep(
            module.register_forward_hook(
                lambda _, __, loss: _before_backward(loss, self._backward_begins)
            )
        )
        for number, (layer, part) in enumerate(self._layers):
            keep(layer.register_forward_pre_hook(functools.partial(self._begins, part)))
            keep(layer.register_forward_hook(functools.partial(self._computed, number)))
        for one in self._rest:
            keep(one.register_post_accumulate_grad_hook(self._accumulated))

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step of ``micro_batches`` micro-batches, of which the last one sends its gradients."""
        self._left = micro_batches

    def forward_begins(self, *_: object) -> None:
        """Begin a micro-batch or an evaluation: gather the weights outside of layers."""
        self._left -= 1
        self._is_backward = False
        self._needed(self._rest)

    def evaluation_ended(self) -> None:
        """Release the weights that an evaluation gathered."""
        self._gathered = None
        self._whole.pop(id(self._rest), None)

    def _begins(self, part: Part, _: nn.Module, given: Any) -> Any:
        self._needed(part)
        if not self._is_backward and given[0].requires_grad:
            first = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._went_back(part), given[0]
            )
            return (first, *given[1:])
        return None

    def _needed(self, part: Part) -> None:
        """Gather weights, unless they are whole."""
        if id(part) not in self._whole:
            # The block of the last gather is released when this one has been written.
            self._gather(part)
            self._make_whole(part)

    def _gather(self, part: Part) -> None:
        shard, dtype = self._size(part), part[0].dtype
        narrow = (
            None
            if dtype == torch.float32
            else self._made(shard, Term.PARAMETERS, _GATHERING, dtype)
        )
        self._gathered = self._made(
            shard * self._ranks, Term.PARAMETERS, _GATHERING, dtype
        )
        del narrow  # the shard in the dtype of the layer, which is sent

    def _make_whole(self, part: Part) -> None:
        with self._tape.owned_by(Term.PARAMETERS):
            self._whole[id(part)] = [torch.empty_like(one) for one in part]

    def _computed(self, number: int, _: nn.Module, __: object, output: Any) -> None:
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
            self._gather(self._layers[number][1])

    def _accumulated(self, _: nn.Parameter) -> None:
        self._missing -= 1
        if not self._missing:
            self._went_back(self._rest)

    def _went_back(self, part: Part) -> None:
        for one in part:
            if id(one) in self._sums:
                one.grad = None  # added to the sum
        self._whole.pop(id(part), None)
        if self._left:
            for one in part:
                if one.grad is not None and one.grad.dtype != self._sent_dtype:
                    with self._tape.owned_by(Term.GRADIENTS):
                        self._sums[id(one)] = one.grad.to(self._sent_dtype)
                    one.grad = None
            return
        self._sent = None
        self._sent = self._made(
            self._size(part) * self._ranks, Term.GRADIENTS, _COMPUTING, self._sent_dtype
        )
        for one in part:
            one.grad = None
            self._sums.pop(id(one), None)
        received = self._made(
            self._size(part), Term.GRADIENTS, _SENDING, self._sent_dtype
        )
        with self._tape.owned_by(Term.GRADIENTS, _SENDING):
            received = received.float()
        shards = [self._shards[id(one)] for one in part]
        for shard, gradient in zip(
            shards, received.split([one.numel() for one in shards]), strict=True
        ):
            shard.grad = gradient.view_as(shard)
        if part is self._rest:
            self._sent = None

    def _size(self, part: Part) -> int:
        """Return the number of elements that a rank holds of some parameters."""
        return sum(self._shards[id(one)].numel() for one in part)

    def _made(
        self, numbers: int, owner: str, stream: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        with self._tape.owned_by(owner, stream):
            return torch.empty(numbers, dtype=dtype, device=self._rest[0].device)


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


def _trained(parameters: Iterable[nn.Parameter]) -> Part:
    return [one for one in parameters if one.requires_grad]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    missing: int = 0


class GradientBuckets:
    """Gradient buckets of a module's trained parameters.

    The last backward of every step sends them.

    They follow torch's ``reducer.cpp``: one bucket holds all gradients of the first
    backward. The next forward lays out smaller ones in the order in which gradients
    became ready. A computed gradient becomes a view of its bucket.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, tape: AllocationRecorder
    ) -> None:
        self._module, self._config, self._tape = module, config, tape
        self._parameters = _trained(module.parameters())
        self._backwards = 0
        self._left: dict[int, int] = {}
        self._views: dict[int, tuple[_Bucket, torch.Tensor]] = {}
        self._ready: list[nn.Parameter] = []
        """Parameters in the order in which their gradients were ready in the first
        backward that sends."""
        self._rebuilt = False

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Make the buckets, and fill them until the hooks are removed."""
        blocks = [torch.empty(0)] * 2
        for number, piece in enumerate(_assigned(self._parameters, [_BROADCAST_BYTES])):
            blocks[number % 2] = torch.empty(0)
            blocks[number % 2] = self._made(piece.size_bytes)
        del blocks
        self._lay_out(_assigned(self._parameters, []))
        for one in self._parameters:
            hooks.enter_context(
                one.register_post_accumulate_grad_hook(self._accumulated)
            )
        hooks.enter_context(
            self._module.register_forward_pre_hook(self._forward_begins)
        )
        hooks.enter_context(self._module.register_forward_hook(self._forward_ended))

    def step_begins(self, backwards: int) -> None:
        """Begin a step of ``backwards`` micro-batches, of which the last one sends the gradients."""
        self._backwards = backwards
        self._left = dict.fromkeys(map(id, self._parameters), backwards)

    def _made(self, size_bytes: int) -> torch.Tensor:
        with self._tape.owned_by(Term.GRADIENTS):
            return torch.empty(size_bytes // 4, device=self._parameters[0].device)

    def _lay_out(self, buckets: Sequence[_Bucket]) -> None:
        # Released before others are made, but for those that are some parameter's
        # gradient.
        self._views = {}
        for bucket in buckets:
            buffer = self._made(bucket.size_bytes)
            views = buffer.split([one.numel() for one in bucket.parameters])
            for parameter, view in zip(bucket.parameters, views, strict=True):
                self._views[id(parameter)] = bucket, view.view_as(parameter)

    def _forward_begins(self, *_: object) -> None:
        if self._ready and not self._rebuilt:
            self._rebuilt = True
            cap_mib = self._config.parallel.bucket_cap_mib
            first = [_FIRST_BUCKET_BYTES] if cap_mib == TORCHS_BUCKET_CAP_MIB else []
            self._lay_out(_assigned(self._ready, [*first, cap_mib * MIB]))

    def _forward_ended(self, *_: object) -> None:
        self._backwards -= 1
        if self._backwards or not self._config.parallel.gradient_as_bucket_view:
            return
        for parameter in self._parameters:  # gradients move to the buckets
            if parameter.grad is not None:
                parameter.grad = self._views[id(parameter)][1]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._left[id(parameter)] -= 1
        if self._left[id(parameter)]:
            return
        if not self._rebuilt:
            self._ready.append(parameter)
        bucket, view = self._views[id(parameter)]
        if self._config.parallel.gradient_as_bucket_view:
            parameter.grad = view
        bucket.missing = (bucket.missing or len(bucket.parameters)) - 1
        if not bucket.missing and self._config.parallel.gradient_dtype != "fp32":
            self._tape.transient(bucket.size_bytes // 2)  # the copy that is sent


def _assigned(
    parameters: Sequence[nn.Parameter], limits_bytes: Sequence[int]
) -> list[_Bucket]:
    """Divide parameters into buckets, each full at its limit in bytes.

    The last limit is that of all further ones.
    """
    buckets = [_Bucket()]
    for parameter in parameters:
        buckets[-1].parameters.append(parameter)
        buckets[-1].size_bytes += 4 * parameter.numel()
        if (
            limits_bytes
            and buckets[-1].size_bytes
            >= limits_bytes[min(len(buckets), len(limits_bytes)) - 1]
        ):
            buckets.append(_Bucket())
    return [bucket for bucket in buckets if bucket.parameters]
