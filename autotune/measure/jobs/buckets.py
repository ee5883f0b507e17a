"""DDP's gradient buckets on the meta device: what they hold on to, and what their reduction takes for a moment.

A trace has one rank, and DDP is not there with one rank; so its allocations are made in its place, by the rules of
torch's ``reducer.cpp``. One bucket holds all gradients of the first backward. The next forward lays out smaller ones in
the order in which gradients became ready. A gradient that was computed is copied into its bucket and becomes a view of
it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autotune.core.allocations import Term
from autotune.measure.jobs.tape import Tape
from trainer.config import TrainConfig
from trainer.parallel import TORCHS_BUCKET_CAP_MIB

MIB = 2**20
_FIRST_BUCKET_BYTES = MIB
_BROADCAST_BYTES = 250 * MIB
"""DDP sends the first weights in pieces of this size, two of which exist at a time."""


@dataclass(slots=True, kw_only=True)
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    missing: int = 0


class GradientBuckets:
    """Buckets of a module's gradients; the last backward of every step sends them.

    Args:
        module: Its trained parameters have the gradients.
        config: The sizes of buckets, and what gradients travel as.
        tape: Told what buckets hold.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, tape: Tape) -> None:
        self._module, self._config, self._tape = module, config, tape
        self._parameters = [one for one in module.parameters() if one.requires_grad]
        self._backwards = 0
        self._left: dict[int, int] = {}
        self._views: dict[int, tuple[_Bucket, torch.Tensor]] = {}
        self._ready: list[nn.Parameter] = []
        """In the order of the first backward that sends."""
        self._rebuilt = False

    def keep(self, hooks: contextlib.ExitStack) -> None:
        """Make the buckets, and fill them until the hooks are removed."""
        pieces = [one.size_bytes for one in _assigned(self._parameters, [_BROADCAST_BYTES])]
        blocks = [torch.empty(0)] * 2
        for number, size_bytes in enumerate(pieces):
            blocks[number % 2] = torch.empty(0)
            blocks[number % 2] = self._made(size_bytes)
        del blocks
        self._lay_out(_assigned(self._parameters, []))
        for one in self._parameters:
            hooks.enter_context(one.register_post_accumulate_grad_hook(self._accumulated))
        hooks.enter_context(self._module.register_forward_pre_hook(self._forward_begins))
        hooks.enter_context(self._module.register_forward_hook(self._forward_ended))

    def step_begins(self, backwards: int) -> None:
        """So many micro-batches follow, of which the last one sends."""
        self._backwards = backwards
        self._left = dict.fromkeys(map(id, self._parameters), backwards)

    def _made(self, size_bytes: int) -> torch.Tensor:
        owner, self._tape.owner = self._tape.owner, Term.GRADIENTS
        made = torch.empty(size_bytes // 4, device=self._parameters[0].device)
        self._tape.owner = owner
        return made

    def _lay_out(self, buckets: Sequence[_Bucket]) -> None:
        self._views = {}  # released before others are made, but for those that are some parameter's gradient
        for bucket in buckets:
            buffer = self._made(bucket.size_bytes)
            offset = 0
            for parameter in bucket.parameters:
                view = buffer[offset : offset + parameter.numel()].view_as(parameter)
                self._views[id(parameter)] = bucket, view
                offset += parameter.numel()

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
        for parameter in self._parameters:  # gradients move to the buckets that are going to be sent
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
        if not bucket.missing:
            # The norm's squares, and what travels if that is narrower.
            self._tape.passing(bucket.size_bytes)
            if self._config.parallel.gradient_dtype != "fp32":
                self._tape.passing(bucket.size_bytes // 2)


def _assigned(parameters: Sequence[nn.Parameter], limits_bytes: Sequence[int]) -> list[_Bucket]:
    """Divide parameters into buckets that are full at so many bytes; the last limit is that of all further ones."""
    buckets = [_Bucket()]
    for parameter in parameters:
        buckets[-1].parameters.append(parameter)
        buckets[-1].size_bytes += 4 * parameter.numel()
        if limits_bytes and buckets[-1].size_bytes >= limits_bytes[min(len(buckets), len(limits_bytes)) - 1]:
            buckets.append(_Bucket())
    return [bucket for bucket in buckets if bucket.parameters]
