"""DDP's gradient buckets on the meta device: what they hold on to, and what their reduction takes for a moment.

A trace has one rank, and DDP is not there with one rank; so its allocations are made in its place, by the rules of
torch's ``reducer.cpp``: buckets are filled in the reverse order of the parameters, the first one small, and live as
long as the model. A gradient that was computed anew is copied into its bucket and becomes a view of it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autotune.measure.jobs.tape import GRADIENTS, Tape
from trainer.config import TrainConfig

_FIRST_BUCKET_BYTES = 2**20
MIB = 2**20


@dataclass(slots=True, kw_only=True)
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    missing: int = 0


class GradientBuckets:
    """Buckets of a module's gradients; the last backward of every step sends them.

    Args:
        parameters: Those that are trained, in the module's order.
        config: The sizes of buckets, and what gradients travel as.
        tape: Told what buckets hold.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: TrainConfig, tape: Tape) -> None:
        self._parameters, self._config, self._tape = parameters, config, tape
        self._left: dict[int, int] = {}
        self._views: dict[int, tuple[_Bucket, torch.Tensor]] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Make the buckets, and fill them within the block."""
        self._tape.owner = GRADIENTS
        for bucket in _assigned(self._parameters, self._config.parallel.bucket_cap_mib * MIB):
            buffer = torch.empty(bucket.size_bytes // 4, device=self._parameters[0].device)
            offset = 0
            for parameter in bucket.parameters:
                view = buffer[offset : offset + parameter.numel()].view_as(parameter)
                self._views[id(parameter)] = bucket, view
                offset += parameter.numel()
        handles = [one.register_post_accumulate_grad_hook(self._accumulated) for one in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step_begins(self, backwards: int) -> None:
        """So many micro-batches follow, of which the last one sends."""
        self._left = dict.fromkeys(map(id, self._parameters), backwards)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._left[id(parameter)] -= 1
        if self._left[id(parameter)]:
            return
        bucket, view = self._views[id(parameter)]
        if self._config.parallel.gradient_as_bucket_view:
            parameter.grad = view
        bucket.missing = (bucket.missing or len(bucket.parameters)) - 1
        if not bucket.missing:
            # The norm's squares, and what travels where that is narrower.
            self._tape.passing(bucket.size_bytes)
            if self._config.parallel.gradient_dtype != "fp32":
                self._tape.passing(bucket.size_bytes // 2)


def _assigned(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[_Bucket]:
    buckets = [_Bucket()]
    limit = min(_FIRST_BUCKET_BYTES, cap_bytes)
    for parameter in reversed(parameters):
        buckets[-1].parameters.append(parameter)
        buckets[-1].size_bytes += 4 * parameter.numel()
        if buckets[-1].size_bytes >= limit:
            buckets.append(_Bucket())
            limit = cap_bytes
    return [bucket for bucket in buckets if bucket.parameters]
