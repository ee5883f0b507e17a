"""Optimizer step: micro-batches, gradient accumulation, clipping, update.

Training and trials run this same code.

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

from trainer.data.micro_batch import MicroBatch
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.parallel import ParallelModule
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps
from trainer.health.monitor import NO_LIMITS, Limits
from trainer.runtime.device_events import DeviceEvent, mark, to_device
from trainer.runtime.ranks import Ranks

_LARGEST_FP32 = float(torch.finfo(torch.float32).max)
"""Largest loss and gradient norm that a step without limits may have."""
_CLIPPING_EPSILON = 1e-6
"""Addition to the norm, as in torch's clipping: a norm just below the limit is cut
too."""
_TOKENS_INDEX = 0
"""Index of the number of predicted tokens among the numbers summed over ranks; the
caller's values follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGradient:
    """Gradient of a part of the step's tokens.

    The gradient noise scale is estimated from it.
    """

    squared_norm: torch.Tensor
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
    """Event at which the step began."""
    count_requested: DeviceEvent
    """Event before the device waits for the number of predicted tokens of all ranks."""
    count_received: DeviceEvent
    """Event after the device has waited for the number of predicted tokens of all
    ranks."""
    gradients_sent: DeviceEvent | None
    """Event at which this rank sent the last of its gradients; None if unknown, or with
    a single rank."""
    reduced: DeviceEvent
    """Event at which this rank had the fully reduced gradient."""
    updated: DeviceEvent
    """Event after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenCount:
    """Number of predicted tokens of all ranks; events are as in ``StepResult``."""

    weight: torch.Tensor
    """Weight of each token's loss: the inverse of the number, shape ()."""
    requested: DeviceEvent
    received: DeviceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """Result of the forward and backward passes; fields are as in ``StepResult``."""

    loss: torch.Tensor
    partial: PartialGradient | None
    count_requested: DeviceEvent
    count_received: DeviceEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientMeasurement:
    """Measurement of the step's gradients; fields are as in ``StepResult``."""

    partial: PartialGradient | None
    gradients_sent: DeviceEvent | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Result of clipping and update; fields are as in ``StepResult``."""

    grad_norm: torch.Tensor
    applied: torch.Tensor


class TrainStep:
    """Optimizer step of a module and its optimizer.

    Args:
        parallel_module: The module, wrapped for its parallel strategy.
        optimizer: Optimizer of its parameters.
        config: Configuration of the training.
        ranks: This process's rank.
        weights_changed: Function to call after every update of the weights.
    """

    def __init__(
        self,
        parallel_module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        *,
        weights_changed: Callable[[], None],
    ) -> None:
        self._module = parallel_module.module
        self._traffic = parallel_module.traffic
        self._synchronise = parallel_module.synchronise
        self._optimizer = optimizer
        self._config = config
        self._ranks = ranks
        self._weights_changed = weights_changed
        self.parameters = [
            parameter
            for parameter in self._module.parameters()
            if parameter.requires_grad
        ]
        """Trained parameters of the module."""
        # With gradient accumulation, gradients outlive the next forward. If each
        # backward allocated them, they would fragment up to 5 % of GPU memory.
        self.keeps_gradients = (
            config.device == "cuda"
            and gradient_accumulation_steps(config, ranks.world_size) > 1
            and config.parallel.strategy != "fsdp2"
        )
        """True if gradients keep their memory from step to step."""
        if self.keeps_gradients and self._traffic is None:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        # DDP learns a static graph in the first step, whose backward passes must all
        # synchronise: the accumulated gradient is the same.
        self._learns_graph = config.parallel.static_graph and self._traffic is not None
        self.progressed: Callable[[], None] = lambda: None
        """Callback before each micro-batch."""

    def rehearse(self, batch: MicroBatch) -> None:
        """Run a forward and backward without an update.

        This compiles layers. It also lets DDP arrange its buckets before the first
        step, so that a training that resumes has the same ones.
        """
        batch = batch.to(self._ranks.device)
        with self._synchronise(enabled=True):
            self._module(batch).backward()
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        if self._traffic is not None:
            self._traffic.take_measurement()
        self._learns_graph = False

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
        predicted tokens of all ranks and micro-batches, which stays on the device.

        Args:
            micro_batches: This rank's part of the global batch.
            lr: Learning rate.
            measure_partial: Whether a single rank also measures the gradient of its
                first micro-batch; under DDP, each rank always measures its own.
            limits: Limits above which the update is skipped.
            values: Numbers to sum over ranks, together with the number of tokens.
        """
        device = self._ranks.device
        began = mark(device)
        batches = [batch.to(device) for batch in micro_batches]
        tokens_of_rank = sum(batch.predicted_tokens for batch in batches)
        sums = to_device([float(tokens_of_rank), *values], device)
        backward = self._forward_and_backward(
            batches, tokens_of_rank, sums, measure_partial=measure_partial
        )
        reduced = mark(device)
        gradients = self._measure_gradients(backward.partial, len(batches))
        update = self._update(lr, backward.loss, limits)
        return StepResult(
            loss=backward.loss,
            grad_norm=update.grad_norm,
            applied=update.applied,
            sums=sums[_TOKENS_INDEX + 1 :],
            partial=gradients.partial,
            began=began,
            count_requested=backward.count_requested,
            count_received=backward.count_received,
            gradients_sent=gradients.gradients_sent,
            reduced=reduced,
            updated=mark(device),
        )

    def _measure_gradients(
        self, first_part: PartialGradient | None, micro_batches: int
    ) -> _GradientMeasurement:
        """Return the gradient of a part of the step, and when this rank sent its own.

        Under DDP the part is this rank's part of the global batch, else it is
        ``first_part``.
        """
        learned_graph = self._learns_graph
        self._learns_graph = False
        if self._traffic is None:
            return _GradientMeasurement(partial=first_part, gradients_sent=None)
        traffic = self._traffic.take_measurement()
        if learned_graph and micro_batches > 1:
            # The gradients of every micro-batch were averaged, so the norm of this
            # rank's own gradient and its wait for other ranks are unknown.
            return _GradientMeasurement(partial=first_part, gradients_sent=None)
        return _GradientMeasurement(
            partial=PartialGradient(
                squared_norm=traffic.squared_norm, share=1 / self._ranks.world_size
            ),
            gradients_sent=traffic.gradients_sent,
        )

    def _forward_and_backward(
        self,
        batches: Sequence[MicroBatch],
        tokens_of_rank: int,
        sums: torch.Tensor,
        *,
        measure_partial: bool,
    ) -> _Backward:
        """Accumulate the gradients of all micro-batches and ranks.

        The all-reduce of ``sums`` overlaps with the first forward, and that of the loss
        with the last backward. ``sums`` holds the sums over ranks afterwards.
        """
        # Under DDP, each rank measures its own part: see ``_measure_gradients``.
        measures_first = (
            measure_partial and len(batches) > 1 and self._ranks.world_size == 1
        )
        wait_for_sums = self._ranks.all_reduce_async(sums)
        loss_sum = torch.zeros((), dtype=torch.float64, device=sums.device)
        count: _TokenCount | None = None
        wait_for_loss: Callable[[], object] | None = None
        partial: PartialGradient | None = None
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            self.progressed()
            with self._synchronise(enabled=is_last or self._learns_graph):
                loss = self._module(batch)
                if count is None:
                    count = _receive_token_count(sums, wait_for_sums)
                loss_sum += loss.detach()
                if is_last:
                    loss_sum *= count.weight
                    wait_for_loss = self._ranks.all_reduce_async(loss_sum)
                # DDP and fsdp2 average gradients over ranks, but the loss is already
                # divided by the predicted tokens of all ranks.
                (loss * (count.weight * self._ranks.world_size)).backward()
            if measures_first and number == 0:
                partial = self._partial_gradient(batch, tokens_of_rank)
        # A step has at least one micro-batch: the first has set ``count``, and the last
        # ``wait_for_loss``.
        assert count is not None
        assert wait_for_loss is not None
        wait_for_loss()
        return _Backward(
            loss=loss_sum,
            partial=partial,
            count_requested=count.requested,
            count_received=count.received,
        )

    def _partial_gradient(
        self, batch: MicroBatch, tokens_of_rank: int
    ) -> PartialGradient | None:
        """Return the gradient of the only micro-batch so far.

        Returns:
            The gradient, or None if the micro-batch has no token to predict.
        """
        if batch.predicted_tokens == 0:
            return None
        share = batch.predicted_tokens / tokens_of_rank
        # So far, the gradient is the part's contribution to the mean over the whole
        # step.
        norm = gradient_norm(self.parameters) / share
        return PartialGradient(squared_norm=norm.square(), share=share)

    def _update(self, lr: float, loss: torch.Tensor, limits: Limits) -> _Update:
        """Clip the gradient and update the weights, unless a limit is exceeded."""
        norm = gradient_norm(self.parameters)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        # Finite, so that neither infinity nor NaN is within the limits.
        max_loss = min(limits.loss, _LARGEST_FP32)
        max_norm = min(limits.grad_norm, _LARGEST_FP32)
        is_healthy = (loss <= max_loss) & (norm <= max_norm)
        max_grad_norm = self._config.max_grad_norm
        divisor = ((norm + _CLIPPING_EPSILON) / max_grad_norm).clamp(min=1)

        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # Made for loss scaling: fused optimizers divide gradients by ``grad_scale``,
        # and skip the update if ``found_inf`` is 1.
        adamw: Any = unwrap_optimizer(self._optimizer)
        adamw.grad_scale = divisor.float()
        adamw.found_inf = (~is_healthy).float()
        self._optimizer.step()
        self._weights_changed()
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return _Update(grad_norm=norm, applied=is_healthy)


def _receive_token_count(
    sums: torch.Tensor, wait_for_sums: Callable[[], object]
) -> _TokenCount:
    """Let the device wait for the number of predicted tokens of all ranks."""
    requested = mark(sums.device)
    wait_for_sums()
    received = mark(sums.device)
    return _TokenCount(
        weight=1 / sums[_TOKENS_INDEX].clamp(min=1),
        requested=requested,
        received=received,
    )


def gradient_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the L2 norm of all gradients together, shape ().

    With sharded weights it is a DTensor over all shards.
    """
    gradients = [
        parameter.grad for parameter in parameters if parameter.grad is not None
    ]
    if gradients[0].device.type == "cpu":
        # torch's norm of a million numbers on a CPU is off by 1e-4. The norm of the
        # norms along the last dimension is exact to rounding.
        gradients = [
            torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients
        ]
    return nn.utils.get_total_norm(gradients)
