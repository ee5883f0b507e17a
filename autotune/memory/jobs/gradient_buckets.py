"""Gradient buckets of DDP on one rank, for a trace.

A trace has a single rank, whose DDP would make no buckets, so these replace torch's.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autotune.base.units import MIB
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term
from trainer.config.train_config import TrainConfig
from trainer.distributed.parallel import DEFAULT_BUCKET_CAP_MIB

_FIRST_BUCKET_BYTES = MIB
"""Size of the first bucket of torch's DDP, small so that sending begins early."""
_FP32_BYTES = 4
_BROADCAST_BYTES = 250 * MIB
"""Size from which a piece is full, in which torch's DDP sends the first weights."""


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients are sent together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    size_bytes: int = 0
    """Size of their gradients in fp32."""
    missing_gradients: int = 0
    """Gradients that are not computed yet; 0 before the first one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Place of a gradient in its bucket."""

    bucket: _Bucket
    view: torch.Tensor
    """View of the bucket's memory, with the shape of the gradient."""


class GradientBuckets:
    """Gradient buckets of a module's trained parameters, after torch's ``reducer.cpp``.

    The last backward of every step sends them. One bucket holds all gradients of the
    first backward. The next forward lays out smaller ones, in the order in which
    gradients became ready. A computed gradient becomes a view of its bucket.

    Args:
        module: Module whose gradients are sent.
        config: Trainer settings, for those of its parallel strategy.
        recorder: Recorder of the allocations.
    """

    def __init__(
        self, module: nn.Module, config: TrainConfig, recorder: AllocationRecorder
    ) -> None:
        self._module = module
        self._config = config
        self._recorder = recorder
        self._parameters = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        self._forwards_to_come = 0
        """Micro-batches of the step whose forward has not ended."""
        self._backwards_to_come: dict[int, int] = {}
        """Backwards of each parameter that the step still has, by its identity."""
        self._slots: dict[int, _Slot] = {}
        """Slot of each parameter's gradient, by identity of the parameter."""
        self._ready: list[nn.Parameter] = []
        """Parameters in the order in which their gradients were ready in the first
        backward that sends."""
        self._rebuilt = False
        """True once smaller buckets replaced the first one."""

    def register_hooks(self, hooks: contextlib.ExitStack) -> None:
        """Make the buckets, and fill and send them until the hooks are removed."""
        self._broadcast_weights()
        self._lay_out(_divide_into_buckets(self._parameters, []))
        enter = hooks.enter_context
        for parameter in self._parameters:
            enter(
                parameter.register_post_accumulate_grad_hook(self._gradient_accumulated)
            )
        enter(self._module.register_forward_pre_hook(self._forward_begins))
        enter(self._module.register_forward_hook(self._forward_ended))

    def _broadcast_weights(self) -> None:
        """Record the blocks in which DDP sends the first weights."""
        # Two pieces exist at a time: each replaces the one before the last, which is
        # released first.
        nothing = torch.empty(0)
        blocks = [nothing, nothing]
        pieces = _divide_into_buckets(self._parameters, [_BROADCAST_BYTES])
        for number, piece in enumerate(pieces):
            blocks[number % 2] = nothing
            blocks[number % 2] = self._empty(piece.size_bytes)

    def step_begins(self, micro_batches: int) -> None:
        """Begin a step, of which the last micro-batch sends the gradients."""
        self._forwards_to_come = micro_batches
        self._backwards_to_come = dict.fromkeys(
            map(id, self._parameters), micro_batches
        )

    def _empty(self, size_bytes: int) -> torch.Tensor:
        """Return a new block for gradients in fp32."""
        with self._recorder.owned_by(Term.GRADIENTS):
            device = self._parameters[0].device
            return torch.empty(size_bytes // _FP32_BYTES, device=device)

    def _lay_out(self, buckets: Sequence[_Bucket]) -> None:
        """Replace all buckets by these."""
        # Earlier buckets are released before others are made, unless a gradient is a
        # view of them.
        self._slots = {}
        for bucket in buckets:
            buffer = self._empty(bucket.size_bytes)
            views = buffer.split([parameter.numel() for parameter in bucket.parameters])
            for parameter, view in zip(bucket.parameters, views, strict=True):
                self._slots[id(parameter)] = _Slot(
                    bucket=bucket, view=view.view_as(parameter)
                )

    def _forward_begins(self, *_: object) -> None:
        """Lay out smaller buckets, once it is known when gradients become ready."""
        if not self._ready or self._rebuilt:
            return
        self._rebuilt = True
        cap_mib = self._config.parallel.bucket_cap_mib
        limits_bytes = [cap_mib * MIB]
        if cap_mib == DEFAULT_BUCKET_CAP_MIB:
            limits_bytes.insert(0, _FIRST_BUCKET_BYTES)
        self._lay_out(_divide_into_buckets(self._ready, limits_bytes))

    def _forward_ended(self, *_: object) -> None:
        """Count the forwards of a step; the last one's backward sends gradients."""
        self._forwards_to_come -= 1
        is_last = not self._forwards_to_come
        if is_last and self._config.parallel.gradient_as_bucket_view:
            self._move_gradients()

    def _move_gradients(self) -> None:
        """Move the gradients of earlier micro-batches to the buckets."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = self._slots[id(parameter)].view

    def _gradient_accumulated(self, parameter: nn.Parameter) -> None:
        """Count the backwards of a parameter; send its bucket after the last of all."""
        self._backwards_to_come[id(parameter)] -= 1
        if self._backwards_to_come[id(parameter)]:
            return
        if not self._rebuilt:
            self._ready.append(parameter)
        slot = self._slots[id(parameter)]
        if self._config.parallel.gradient_as_bucket_view:
            parameter.grad = slot.view
        bucket = slot.bucket
        if not bucket.missing_gradients:
            bucket.missing_gradients = len(bucket.parameters)
        bucket.missing_gradients -= 1
        if not bucket.missing_gradients:
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        """Record the block from which a bucket is sent."""
        # Gradients in fp32 are sent from the bucket itself, others from a 16-bit copy.
        if self._config.parallel.gradient_dtype != "fp32":
            self._recorder.record_transient(bucket.size_bytes // 2)


def _divide_into_buckets(
    parameters: Sequence[nn.Parameter], limits_bytes: Sequence[int]
) -> list[_Bucket]:
    """Divide parameters into buckets, in their order.

    Args:
        parameters: Parameters to divide.
        limits_bytes: Size from which each bucket is full, for the first buckets; all
            further buckets have the last limit. Empty for a single bucket.
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
