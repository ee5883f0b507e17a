"""Gradient buckets of DDP on one rank, for a trace.

A trace has a single rank, whose DDP would make no buckets, so these replace torch's.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autotune.base.units import MIB
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term

FIRST_BUCKET_BYTES = MIB
"""Size at which DDP closes its first bucket by default, so that its all-reduce begins
early: ``_DEFAULT_FIRST_BUCKET_BYTES`` of ``torch.distributed``."""
_BROADCAST_BYTES = 250 * MIB
"""Size at which DDP closes a block of the weights that it broadcasts when it wraps a
model: ``broadcast_bucket_size`` of torch's ``DistributedDataParallel``."""
_FP32_BYTES = 4


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients are all-reduced together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    """Size of their gradients in fp32."""
    ready_gradients: int = 0
    """Number of gradients that are computed, in a backward that all-reduces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketView:
    """Part of a bucket that holds one gradient."""

    bucket: _Bucket
    gradient: torch.Tensor
    """View of the bucket's memory, with the shape of the gradient."""


class GradientBuckets:
    """Gradient buckets of a module's trained parameters, after torch's ``reducer.cpp``.

    The last backward of every step all-reduces them. One bucket holds all gradients of
    the first backward. The next forward lays out smaller ones, in the order in which
    gradients became ready. A computed gradient becomes a view of its bucket.

    Args:
        module: Module whose gradients are all-reduced.
        recorder: Recorder of the allocations.
        limits_bytes: Size at which each bucket is closed, for the first buckets; all
            further buckets have the last limit.
        as_views: True if gradients are views of their buckets, not copied to them.
        sent_dtype: dtype in which gradients are all-reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        recorder: AllocationRecorder,
        *,
        limits_bytes: Sequence[int],
        as_views: bool,
        sent_dtype: torch.dtype,
    ) -> None:
        self._module = module
        self._recorder = recorder
        self._limits_bytes = limits_bytes
        self._as_views = as_views
        self._sent_dtype = sent_dtype
        self._parameters = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self._forwards_to_come = 0
        """Micro-batches of the step whose forward has not ended."""
        self._backwards_to_come: dict[int, int] = {}
        """Backwards of each parameter that the step still has, by its identity."""
        self._views: dict[int, _BucketView] = {}
        """View of each parameter's gradient, by identity of the parameter."""
        self._ready: list[nn.Parameter] = []
        """Parameters in the order in which their gradients were ready in the first
        backward that all-reduces."""
        self._rebuilt = False
        """True once smaller buckets replaced the first one."""

    def register_hooks(self, hooks: contextlib.ExitStack) -> None:
        """Make the buckets, and fill them until the hooks are removed."""
        self._broadcast_weights()
        self._lay_out(_divide_into_buckets(self._parameters, []))
        for parameter in self._parameters:
            hooks.enter_context(
                parameter.register_post_accumulate_grad_hook(self._gradient_accumulated)
            )
        hooks.enter_context(
            self._module.register_forward_pre_hook(self._forward_begins)
        )
        hooks.enter_context(self._module.register_forward_hook(self._forward_ended))

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step, of which the last micro-batch all-reduces the gradients."""
        self._forwards_to_come = micro_batches
        self._backwards_to_come = dict.fromkeys(
            map(id, self._parameters), micro_batches
        )

    def _broadcast_weights(self) -> None:
        """Record the blocks from which DDP broadcasts the weights once."""
        # Two blocks exist at a time, and the older one is released before the next is
        # allocated.
        blocks: deque[torch.Tensor] = deque()
        for bucket in _divide_into_buckets(self._parameters, [_BROADCAST_BYTES]):
            if len(blocks) == 2:
                blocks.popleft()
            blocks.append(self._allocate_buffer(bucket.size_bytes))

    def _allocate_buffer(self, size_bytes: int) -> torch.Tensor:
        """Return a new block for gradients in fp32."""
        with self._recorder.owned_by(Term.GRADIENTS):
            device = self._parameters[0].device
            return torch.empty(size_bytes // _FP32_BYTES, device=device)

    def _lay_out(self, buckets: Sequence[_Bucket]) -> None:
        """Replace all buckets by these."""
        # Earlier buckets are released before others are made, unless a gradient is a
        # view of them.
        self._views = {}
        for bucket in buckets:
            buffer = self._allocate_buffer(bucket.size_bytes)
            views = buffer.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, view in zip(bucket.parameters, views, strict=True):
                self._views[id(parameter)] = _BucketView(
                    bucket=bucket, gradient=view.view_as(parameter)
                )

    def _forward_begins(self, *_: object) -> None:
        """Lay out smaller buckets, once it is known when gradients become ready."""
        order_is_known = bool(self._ready)
        if self._rebuilt or not order_is_known:
            return
        self._rebuilt = True
        self._lay_out(_divide_into_buckets(self._ready, self._limits_bytes))

    def _forward_ended(self, *_: object) -> None:
        """Count the forwards of a step, of which the last one is all-reduced."""
        self._forwards_to_come -= 1
        is_last = not self._forwards_to_come
        if is_last and self._as_views:
            self._move_gradients()

    def _move_gradients(self) -> None:
        """Move the gradients of earlier micro-batches to the buckets."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = self._views[id(parameter)].gradient

    def _gradient_accumulated(self, parameter: nn.Parameter) -> None:
        """Count the backwards of a parameter, and all-reduce a bucket that is full."""
        self._backwards_to_come[id(parameter)] -= 1
        if self._backwards_to_come[id(parameter)]:
            return
        if not self._rebuilt:
            self._ready.append(parameter)
        view = self._views[id(parameter)]
        if self._as_views:
            parameter.grad = view.gradient
        bucket = view.bucket
        bucket.ready_gradients += 1
        if bucket.ready_gradients == len(bucket.parameters):
            bucket.ready_gradients = 0  # for the next step
            self._record_all_reduce(bucket)

    def _record_all_reduce(self, bucket: _Bucket) -> None:
        """Record the block that a bucket's all-reduce needs beside the bucket."""
        # Gradients in fp32 are all-reduced in the bucket, others in a narrower copy.
        if self._sent_dtype != torch.float32:
            elements = bucket.size_bytes // _FP32_BYTES
            self._recorder.record_transient(elements * self._sent_dtype.itemsize)


def _divide_into_buckets(
    parameters: Sequence[nn.Parameter], limits_bytes: Sequence[int]
) -> list[_Bucket]:
    """Divide parameters into buckets, in their order.

    Args:
        parameters: Parameters to divide.
        limits_bytes: Size at which each bucket is closed, for the first buckets; all
            further buckets have the last limit. Empty for a single bucket.
    """
    buckets = [_Bucket()]
    for parameter in parameters:
        bucket = buckets[-1]
        bucket.parameters.append(parameter)
        bucket.size_bytes += _FP32_BYTES * parameter.numel()
        if not limits_bytes:
            continue
        limit_index = min(len(buckets), len(limits_bytes)) - 1
        if bucket.size_bytes >= limits_bytes[limit_index]:
            buckets.append(_Bucket())
    return [bucket for bucket in buckets if bucket.parameters]
