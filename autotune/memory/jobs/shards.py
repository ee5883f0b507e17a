"""Memory of one of several ranks, on the meta device.

These are DDP's gradient buckets, ZeRO-1's optimizer and FSDP2's weights. A trace has a
single rank, which would hold everything and send nothing, so these replace torch's
implementations.
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
# CUDA streams: gathered and received blocks are kept separate from computed ones.
_COMPUTING = 0
_GATHERING = 1
_SENDING = 2
_FIRST_BUCKET_BYTES = MIB
"""Size of the first bucket of torch's DDP, small so that sending begins early."""
_FP32_BYTES = 4
_BROADCAST_BYTES = 250 * MIB
"""Size of the pieces in which DDP sends the first weights; two of them exist at a
time."""


def keep_largest_part(
    optimizer: torch.optim.Optimizer, ranks: int, *, keeps_gradients: bool
) -> None:
    """Leave an optimizer the parameters of the fullest rank under ZeRO-1.

    As in ``ZeroRedundancyOptimizer``, each, the largest first, goes to the rank that
    has the fewest elements so far.
    """
    elements_by_rank = [0] * ranks
    owner_of: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
            rank = elements_by_rank.index(min(elements_by_rank))
            owner_of[id(parameter)] = rank
            elements_by_rank[rank] += parameter.numel()
    all_parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def drop_gradients(*_: object) -> None:
        for parameter in all_parameters:
            parameter.grad = None

    if not keeps_gradients:
        # Its own zero_grad knows its part alone.
        optimizer.register_step_post_hook(drop_gradients)
    fullest_rank = elements_by_rank.index(max(elements_by_rank))
    for group in optimizer.param_groups:
        group["params"] = [
            parameter
            for parameter in group["params"]
            if owner_of[id(parameter)] == fullest_rank
        ]


class Shards:
    """FSDP2 on one rank: weights are sharded, and whole only while they are needed.

    Weights of a layer are whole while it runs, those outside of layers for a whole
    micro-batch. Backward prefetches the weights of the next layer that it needs, and
    copies a layer's gradients into one block to send them; until then, gradients of
    micro-batches add up in the dtype in which they are sent. The training's optimizer
    and step update shards; ``ranks`` share one copy of the weights.
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
        self._layers = [(layer, _trained(layer.parameters())) for layer in layers]
        """Each layer with its trained parameters."""
        in_layers = {id(parameter) for _, part in self._layers for parameter in part}
        everything = _trained(training.module.parameters())
        self._rest = [
            parameter for parameter in everything if id(parameter) not in in_layers
        ]
        """Parameters outside of layers."""
        self._whole: dict[int, list[torch.Tensor]] = {}
        """Whole weights, by identity of their list of parameters."""
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
        recorder.owner = Term.PARAMETERS
        self._shards: dict[int, nn.Parameter] = {}
        for part in (*(part for _, part in self._layers), self._rest):
            for parameter in part:
                self._shards[id(parameter)] = _empty_shard(parameter, ranks)
            recorder.drop(part)
        if bf16:
            with recorder.paused():  # gathered in bf16
                for _, part in self._layers:
                    for parameter in part:
                        parameter.data = parameter.data.bfloat16()
        training.step.parameters = self._shards_of(everything)
        for group in training.optimizer.param_groups:
            group["params"] = self._shards_of(group["params"])

    def _shards_of(self, parameters: Iterable[nn.Parameter]) -> Part:
        return [self._shards[id(parameter)] for parameter in parameters]

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Gather and release weights until the hooks are removed."""
        module, enter = self._module, hooks.enter_context

        def forward_ended(_: nn.Module, __: object, loss: torch.Tensor) -> None:
            _before_backward(loss, self._backward_begins)

        enter(module.register_forward_pre_hook(self.forward_begins))
        enter(module.register_forward_hook(forward_ended))
        for number, (layer, part) in enumerate(self._layers):
            layer_begins = functools.partial(self._layer_begins, part)
            layer_ended = functools.partial(self._layer_ended, number)
            enter(layer.register_forward_pre_hook(layer_begins))
            enter(layer.register_forward_hook(layer_ended))
        for parameter in self._rest:
            enter(parameter.register_post_accumulate_grad_hook(self._accumulated))

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
        self._whole.pop(id(self._rest), None)

    def _layer_begins(self, part: Part, _: nn.Module, arguments: Any) -> Any:
        self._need(part)
        if not self._is_backward and arguments[0].requires_grad:
            first = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                lambda: self._went_back(part), arguments[0]
            )
            return (first, *arguments[1:])
        return None

    def _need(self, part: Part) -> None:
        """Gather weights, unless they are whole."""
        if id(part) not in self._whole:
            # The block of the last gather is released when this one has been written.
            self._gather(part)
            self._make_whole(part)

    def _gather(self, part: Part) -> None:
        """Record the blocks of an all-gather of some parameters."""
        elements = self._elements(part)
        dtype = part[0].dtype
        # The shard in the dtype of the layer, which is sent.
        narrow = None
        if dtype != torch.float32:
            narrow = self._empty(elements, Term.PARAMETERS, _GATHERING, dtype)
        self._gathered = self._empty(
            elements * self._ranks, Term.PARAMETERS, _GATHERING, dtype
        )
        del narrow

    def _make_whole(self, part: Part) -> None:
        with self._recorder.owned_by(Term.PARAMETERS):
            self._whole[id(part)] = [torch.empty_like(parameter) for parameter in part]

    def _layer_ended(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        if self._is_backward:  # a recomputation
            return
        _, part = self._layers[number]
        del self._whole[id(part)]
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        _before_backward(tensor, lambda: self._goes_back(number))

    def _backward_begins(self) -> None:
        self._is_backward = True
        self._missing = len(self._rest)
        self._gather_ahead(len(self._layers) - 1)

    def _goes_back(self, number: int) -> None:
        """Begin the backward of a layer, whose weights are gathered already."""
        _, part = self._layers[number]
        self._make_whole(part)
        self._gather_ahead(number - 1)

    def _gather_ahead(self, number: int) -> None:
        self._gathered = None
        if number >= 0:
            _, part = self._layers[number]
            self._gather(part)

    def _accumulated(self, _: nn.Parameter) -> None:
        self._missing -= 1
        if not self._missing:
            self._went_back(self._rest)

    def _went_back(self, part: Part) -> None:
        """End the backward of some parameters: add up or send their gradients."""
        for parameter in part:
            if id(parameter) in self._sums:
                parameter.grad = None  # added to the sum
        self._whole.pop(id(part), None)
        if self._micro_batches_to_come:
            self._keep_sums(part)
        else:
            self._send(part)

    def _keep_sums(self, part: Part) -> None:
        """Keep gradients for the next micro-batch, in the dtype that is sent."""
        for parameter in part:
            if parameter.grad is None or parameter.grad.dtype == self._sent_dtype:
                continue
            with self._recorder.owned_by(Term.GRADIENTS):
                self._sums[id(parameter)] = parameter.grad.to(self._sent_dtype)
            parameter.grad = None

    def _send(self, part: Part) -> None:
        """Copy gradients into one block, send it, and keep this rank's shard."""
        elements = self._elements(part)
        # The block of the last part is free before the next one is made.
        self._sent = None
        self._sent = self._empty(
            elements * self._ranks, Term.GRADIENTS, _COMPUTING, self._sent_dtype
        )
        for parameter in part:
            parameter.grad = None
            self._sums.pop(id(parameter), None)
        received = self._empty(elements, Term.GRADIENTS, _SENDING, self._sent_dtype)
        with self._recorder.owned_by(Term.GRADIENTS, _SENDING):
            received = received.float()
        shards = self._shards_of(part)
        gradients = received.split([shard.numel() for shard in shards])
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient.view_as(shard)
        if part is self._rest:
            self._sent = None

    def _elements(self, part: Part) -> int:
        """Return the number of elements that a rank holds of some parameters."""
        return sum(shard.numel() for shard in self._shards_of(part))

    def _empty(
        self, elements: int, owner: str, stream: int, dtype: torch.dtype
    ) -> torch.Tensor:
        with self._recorder.owned_by(owner, stream):
            return torch.empty(elements, dtype=dtype, device=self._rest[0].device)


def _empty_shard(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """Return a rank's share of the first dimension, rounded up."""
    rows, *others = parameter.shape
    return nn.Parameter(
        torch.empty((-(-rows // ranks), *others), device=parameter.device)
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


def _trained(parameters: Iterable[nn.Parameter]) -> Part:
    return [parameter for parameter in parameters if parameter.requires_grad]


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients are sent together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    missing: int = 0
    """Gradients that are not computed yet; 0 before the first one is."""


class GradientBuckets:
    """Gradient buckets of a module's trained parameters.

    The last backward of every step sends them. They follow torch's ``reducer.cpp``: one
    bucket holds all gradients of the first backward. The next forward lays out smaller
    ones in the order in which gradients became ready. A computed gradient becomes a
    view of its bucket.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, recorder: AllocationRecorder
    ) -> None:
        self._module = module
        self._config = config
        self._recorder = recorder
        self._parameters = _trained(module.parameters())
        self._forwards_to_come = 0
        self._backwards_to_come: dict[int, int] = {}
        """Number by identity of the parameter."""
        self._views: dict[int, tuple[_Bucket, torch.Tensor]] = {}
        """Bucket of each parameter, and its gradient's view of it."""
        self._ready: list[nn.Parameter] = []
        """Parameters in the order in which their gradients were ready in the first
        backward that sends."""
        self._rebuilt = False

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Make the buckets, and fill them until the hooks are removed."""
        # Weights are broadcast first, in pieces, of which two exist at a time.
        blocks = [torch.empty(0)] * 2
        pieces = _assigned(self._parameters, [_BROADCAST_BYTES])
        for number, piece in enumerate(pieces):
            blocks[number % 2] = torch.empty(0)
            blocks[number % 2] = self._empty(piece.size_bytes)
        del blocks
        self._lay_out(_assigned(self._parameters, []))
        enter = hooks.enter_context
        for parameter in self._parameters:
            enter(parameter.register_post_accumulate_grad_hook(self._accumulated))
        enter(self._module.register_forward_pre_hook(self._forward_begins))
        enter(self._module.register_forward_hook(self._forward_ended))

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step, of which the last micro-batch sends the gradients."""
        self._forwards_to_come = micro_batches
        self._backwards_to_come = dict.fromkeys(
            map(id, self._parameters), micro_batches
        )

    def _empty(self, size_bytes: int) -> torch.Tensor:
        with self._recorder.owned_by(Term.GRADIENTS):
            device = self._parameters[0].device
            return torch.empty(size_bytes // _FP32_BYTES, device=device)

    def _lay_out(self, buckets: Sequence[_Bucket]) -> None:
        # Released before others are made, but for those that are some parameter's
        # gradient.
        self._views = {}
        for bucket in buckets:
            buffer = self._empty(bucket.size_bytes)
            views = buffer.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, view in zip(bucket.parameters, views, strict=True):
                self._views[id(parameter)] = bucket, view.view_as(parameter)

    def _forward_begins(self, *_: object) -> None:
        if not self._ready or self._rebuilt:
            return
        self._rebuilt = True
        cap_mib = self._config.parallel.bucket_cap_mib
        limits_bytes = [cap_mib * MIB]
        if cap_mib == TORCHS_BUCKET_CAP_MIB:
            limits_bytes.insert(0, _FIRST_BUCKET_BYTES)
        self._lay_out(_assigned(self._ready, limits_bytes))

    def _forward_ended(self, *_arguments: object) -> None:
        self._forwards_to_come -= 1
        has_views = self._config.parallel.gradient_as_bucket_view
        if self._forwards_to_come or not has_views:
            return
        for parameter in self._parameters:  # gradients move to the buckets
            if parameter.grad is not None:
                _, view = self._views[id(parameter)]
                parameter.grad = view

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._backwards_to_come[id(parameter)] -= 1
        if self._backwards_to_come[id(parameter)]:
            return
        if not self._rebuilt:
            self._ready.append(parameter)
        bucket, view = self._views[id(parameter)]
        parallel = self._config.parallel
        if parallel.gradient_as_bucket_view:
            parameter.grad = view
        if not bucket.missing:
            bucket.missing = len(bucket.parameters)
        bucket.missing -= 1
        if not bucket.missing and parallel.gradient_dtype != "fp32":
            self._recorder.transient(bucket.size_bytes // 2)  # the copy that is sent


def _assigned(
    parameters: Sequence[nn.Parameter], limits_bytes: Sequence[int]
) -> list[_Bucket]:
    """Divide parameters into buckets, each full at its limit in bytes.

    The last limit is that of all further buckets. Without a limit there is one bucket.
    """
    buckets = [_Bucket()]
    for parameter in parameters:
        bucket = buckets[-1]
        bucket.parameters.append(parameter)
        bucket.size_bytes += _FP32_BYTES * parameter.numel()
        if not limits_bytes:
            continue
        number = min(len(buckets), len(limits_bytes))
        if bucket.size_bytes >= limits_bytes[number - 1]:
            buckets.append(_Bucket())
    return [bucket for bucket in buckets if bucket.parameters]
