"""Optimizer step: micro-batches, gradient accumulation, clipping, update.

Trials run this same code.

The device decides from the loss and gradient of all ranks whether to apply the update,
so the host does not wait. A loss or gradient norm that is not finite or exceeds the
limits leaves weights and optimizer unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.loader import MicroBatch
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import (
    DeviceEvent,
    ParallelModule,
    Ranks,
    mark,
    to_device,
)
from trainer.health.monitor import NO_LIMITS, Limits

_LARGEST = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGradient:
    """Gradient of a part of the step's tokens, for estimating the gradient noise scale."""

    square: torch.Tensor
    """Squared L2 norm of the part's mean gradient, shape ()."""
    share: float
    """Share of the step's tokens in this part, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one optimizer step on this rank.

    Tensors and events stay on the device: reading them waits for it.
    """

    loss: torch.Tensor
    """Mean loss per predicted token over all ranks, shape (), fp64."""
    grad_norm: torch.Tensor
    """L2 norm of the whole gradient before clipping, shape ()."""
    applied: torch.Tensor
    """True if the update was applied, shape (), bool."""
    sums: torch.Tensor
    """Sums over all ranks of the values passed as ``values``, shape (N,), fp64."""
    partial: PartialGradient | None
    """Gradient of a part of the step; None if the step has only one part, or with
    fsdp2."""
    began: DeviceEvent
    count_requested: DeviceEvent
    """Event before the device waits for the number of predicted tokens of all ranks."""
    count_received: DeviceEvent
    """Event after the device has waited for the number of predicted tokens of all
    ranks."""
    departed: DeviceEvent | None
    """Event at which the last gradients were sent to other ranks; None if unknown, or
    with a single rank."""
    reduced: DeviceEvent
    """Event at which this rank had the fully reduced gradient."""
    updated: DeviceEvent


class TrainStep:
    """Optimizer step of a module and its optimizer."""

    def __init__(
        self,
        shared: ParallelModule,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        *,
        weights_changed: Callable[[], None],
    ) -> None:
        self._shared, self._optimizer, self._config, self._ranks = (
            shared,
            optimizer,
            config,
            ranks,
        )
        self._weights_changed = weights_changed
        self.parameters = [
            parameter
            for parameter in shared.module.parameters()
            if parameter.requires_grad
        ]
        # With gradient accumulation, gradients outlive the next forward. Allocated in
        # each backward, they would fragment up to 5 % of GPU memory.
        accumulates = (
            config.device == "cuda"
            and gradient_accumulation_steps(config, ranks.world_size) > 1
        )
        self.keeps_gradients = accumulates and config.parallel.strategy != "fsdp2"
        if self.keeps_gradients and shared.traffic is None:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        # DDP learns a static graph in the first step, where every backward must
        # synchronise; the sum is the same.
        self._learning = config.parallel.static_graph and shared.traffic is not None
        self.progressed: Callable[[], None] = lambda: None
        """Callback before each micro-batch."""

    def rehearse(self, batch: MicroBatch) -> None:
        """Run a forward and backward without an update, to compile layers and order DDP's buckets alike on resume."""
        batch = batch.to(self._ranks.device)
        with self._shared.synchronise(True):
            self._shared.module(batch).backward()
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self._shared.traffic is not None:
            self._shared.traffic.take()
        self._learning = False

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        lr: float,
        *,
        measure_partial: bool = False,
        limits: Limits = NO_LIMITS,
        values: Sequence[float] = (),
    ) -> StepResult:
        """Take one optimizer step.

        The loss of every token has the same weight: each rank divides by the number of
        predicted tokens of all ranks and micro-batches, which stays on the device. With
        ``measure_partial``, a single rank also measures the gradient of its first
        micro-batch; under DDP, each rank always measures its own gradient. ``values``
        are summed over ranks, together with the number of tokens.
        """
        device = self._ranks.device
        began = mark(device)
        batches = [batch.to(device) for batch in micro_batches]
        own_tokens = sum(batch.predicted_tokens for batch in batches)
        sums = to_device([float(own_tokens), *values], device)
        loss, partial, count_requested, count_received = self._forward_and_backward(
            batches, own_tokens, sums, measure_partial=measure_partial
        )
        reduced = mark(device)
        departed = None
        if self._shared.traffic is not None:
            square, departed = self._shared.traffic.take()
            if self._learning and len(batches) > 1:
                # With several reductions, norm and waiting time are unknown.
                departed = None
            else:
                partial = PartialGradient(
                    square=square, share=1 / self._ranks.world_size
                )
        self._learning = False
        grad_norm, applied = self._update(lr, loss, limits)
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            applied=applied,
            sums=sums[1:],
            partial=partial,
            began=began,
            count_requested=count_requested,
            count_received=count_received,
            departed=departed,
            reduced=reduced,
            updated=mark(device),
        )

    def _forward_and_backward(
        self,
        batches: Sequence[MicroBatch],
        own_tokens: int,
        sums: torch.Tensor,
        *,
        measure_partial: bool,
    ) -> tuple[torch.Tensor, PartialGradient | None, DeviceEvent, DeviceEvent]:
        """Accumulate the gradients of all micro-batches and ranks.

        During the first forward, ``sums[0]`` becomes the number of predicted tokens of
        all ranks. Returns the mean loss over all ranks, shape (), the first part's
        gradient, and the events before and after the wait for that number.
        """
        summed = self._ranks.all_reduce_async(sums)
        loss_sum = torch.zeros((), dtype=torch.float64, device=sums.device)
        partial: PartialGradient | None = None
        for number, batch in enumerate(batches):
            self.progressed()
            last = number == len(batches) - 1
            with self._shared.synchronise(last or self._learning):
                loss = self._shared.module(batch)
                if number == 0:
                    count_requested = mark(sums.device)
                    summed()
                    count_received = mark(sums.device)
                    weight = 1 / sums[0].clamp(min=1)
                loss_sum += loss.detach()
                if last:
                    loss_sum *= weight
                    # While the gradients are computed.
                    all_summed = self._ranks.all_reduce_async(loss_sum)
                # DDP averages over ranks, but the loss is already divided by the
                # predicted tokens of all ranks.
                (loss * (weight * self._ranks.world_size)).backward()
            share = batch.predicted_tokens / max(1, own_tokens)
            if (
                measure_partial
                and number == 0
                and not last
                and self._ranks.world_size == 1
                and share
            ):
                # Until here it is the part's contribution to the mean over the whole
                # step.
                partial = PartialGradient(
                    square=(gradient_norm(self.parameters) / share).square(),
                    share=share,
                )
        all_summed()
        return loss_sum, partial, count_requested, count_received

    def _update(
        self, lr: float, loss: torch.Tensor, limits: Limits
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update.

        Return the norm before clipping, and whether the update was applied.
        """
        norm = gradient_norm(self.parameters)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # No number that is not finite is below these.
        fine = (loss <= min(limits.loss, _LARGEST)) & (
            norm <= min(limits.grad_norm, _LARGEST)
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # As torch clips: a norm just below the limit is cut too.
        divisor = ((norm + 1e-6) / self._config.max_grad_norm).clamp(min=1)
        # Fused optimizers divide gradients by the first, and skip the update if the
        # second is 1, as for loss scaling.
        own: Any = unwrap_optimizer(self._optimizer)
        own.grad_scale, own.found_inf = divisor.float(), (~fine).float()
        self._optimizer.step()
        self._weights_changed()
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return norm, fine


def gradient_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the L2 norm of all gradients together, shape ().

    With sharded weights, a DTensor over all shards.
    """
    gradients = [
        parameter.grad for parameter in parameters if parameter.grad is not None
    ]
    if gradients[0].device.type == "cpu":
        # torch's norm of a million numbers on a CPU is off by 1e-4; row by row it is
        # exact to rounding.
        gradients = [
            torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients
        ]
    return nn.utils.get_total_norm(gradients)
