"""One optimizer step: micro-batches, accumulation, clipping, update. Probing trials run this same code.

Whether the update is taken is decided on the device, from the loss and the gradient of all ranks, so that nobody waits
for it: a step whose numbers are not finite, or lie above the limits, leaves weights and optimizer as they were.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.loader import MicroBatch
from trainer.distributed.optimizer import leave_out, set_learning_rate
from trainer.distributed.ranks import DeviceEvent, Ranks, SharedModule, mark
from trainer.health.monitor import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGradient:
    """The gradient of a part of the step's tokens, for telling signal from noise."""

    square: torch.Tensor
    """Shape (): squared L2 norm of the part's mean gradient."""
    share: float
    """The part of the step's tokens that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimizer step was on this rank. Tensors and marks stay on the device: reading them waits for it."""

    loss: torch.Tensor
    """Shape (), fp64: the mean loss per predicted token, over all ranks."""
    grad_norm: torch.Tensor
    """Shape (): the whole gradient's L2 norm before clipping."""
    applied: torch.Tensor
    """Shape (), bool: whether weights and optimizer took the step."""
    told: torch.Tensor
    """Shape (N,), fp64: what the ranks told each other in this step, added up."""
    partial: PartialGradient | None
    """None where the step has one part only, or fsdp2 hides it."""
    began: DeviceEvent
    asked: DeviceEvent
    """Before the device waited for the number of all ranks' tokens."""
    counted: DeviceEvent
    """Behind that wait."""
    departed: DeviceEvent | None
    """When the last gradients left for other ranks; None where nobody can tell, or there are none."""
    reduced: DeviceEvent
    """When this rank had the whole gradient."""
    updated: DeviceEvent


class TrainStep:
    """A module with its optimizer, ready to take steps."""

    def __init__(
        self, shared: SharedModule, optimizer: torch.optim.Optimizer, config: TrainConfig, ranks: Ranks
    ) -> None:
        self._shared = shared
        self._optimizer = optimizer
        self._config = config
        self._ranks = ranks
        self.parameters = [parameter for parameter in shared.module.parameters() if parameter.requires_grad]
        """Whose gradients are clipped together."""
        # If micro-batches accumulate, gradients outlive the next forward. Allocated again in each backward, they would
        # lie scattered between the activations of a GPU, and cost up to 5 % of its memory.
        self.keeps_gradients = (
            config.device == "cuda"
            and gradient_accumulation_steps(config, ranks.world_size) > 1
            and config.parallel.strategy != "fsdp2"
        )
        """Whether gradients keep their memory from step to step."""
        if self.keeps_gradients and shared.traffic is None:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        # A static graph is learned in the first step, whose backwards must all be synchronised; the sum is the same.
        self._learning = config.parallel.static_graph and shared.traffic is not None
        self.progressed: Callable[[], None] = lambda: None
        """Called before each micro-batch."""

    def rehearse(self, batch: MicroBatch) -> None:
        """Go forward and backward once, and forget it: layers are compiled, and DDP lays its buckets out for good.

        DDP orders its buckets by the first backward it sees; that of a resumed run must not reduce its first step in
        another order than a run that was not interrupted.
        """
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
        part_of_it: bool = False,
        limits: Limits = NO_LIMITS,
        told: Sequence[float] = (),
    ) -> StepResult:
        """Take one optimizer step.

        The loss of every token weighs the same: each rank divides by the number of predicted tokens of all ranks and
        micro-batches, which stays on the device.

        With ``part_of_it`` a single rank, too, measures the gradient of its first micro-batch; several always measure
        each their own. ``told`` is what this rank tells the others; it synchronise with the number of tokens.
        """
        device = self._ranks.device
        began = mark(device)
        batches = [batch.to(device) for batch in micro_batches]
        own_tokens = sum(batch.predicted_tokens for batch in batches)
        sums = torch.tensor([float(own_tokens), *told], dtype=torch.float64).to(device, non_blocking=True)
        loss, partial, asked, counted = self._forward_and_backward(batches, own_tokens, sums, part_of_it=part_of_it)
        reduced = mark(device)
        departed = None
        if self._shared.traffic is not None:
            square, departed = self._shared.traffic.take()
            if self._learning and len(batches) > 1:
                departed = None  # several reductions, of which neither norm nor waiting can be told apart
            else:
                partial = PartialGradient(square=square, share=1 / self._ranks.world_size)
        self._learning = False
        grad_norm, applied = self._update(lr, loss, limits)
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            applied=applied,
            told=sums[1:],
            partial=partial,
            began=began,
            asked=asked,
            counted=counted,
            departed=departed,
            reduced=reduced,
            updated=mark(device),
        )

    def _forward_and_backward(
        self, batches: Sequence[MicroBatch], own_tokens: int, sums: torch.Tensor, *, part_of_it: bool
    ) -> tuple[torch.Tensor, PartialGradient | None, DeviceEvent, DeviceEvent]:
        """Add up the gradients of all micro-batches and ranks.

        The first of ``sums`` becomes what all ranks predict, while the first forward is computed. Returned are the mean
        loss over all ranks, shape (), the first part's gradient, and the moments around the wait for that number.
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
                    asked = mark(sums.device)
                    summed()
                    counted = mark(sums.device)
                    weight = 1 / sums[0].clamp(min=1)
                loss_sum += loss.detach()
                if last:
                    loss_sum *= weight
                    all_summed = self._ranks.all_reduce_async(loss_sum)  # while the gradients are computed
                # Ranks are averaged, and the loss is already divided by what all of them predict.
                (loss * (weight * self._ranks.world_size)).backward()
            if part_of_it and number == 0 and not last and self._ranks.world_size == 1:
                partial = self._first_part(batch.predicted_tokens / max(1, own_tokens))
        all_summed()
        return loss_sum, partial, asked, counted

    def _update(self, lr: float, loss: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update; the norm before clipping, and whether the update was taken."""
        norm = gradient_norm(self.parameters)
        nn.utils.clip_grads_with_norm_(self.parameters, self._config.max_grad_norm, norm)
        whole_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        fine = loss.isfinite() & whole_norm.isfinite() & (loss <= limits.loss) & (whole_norm <= limits.grad_norm)
        set_learning_rate(self._optimizer, lr)
        leave_out(self._optimizer, ~fine)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return whole_norm, fine

    def _first_part(self, share: float) -> PartialGradient | None:
        if not share:
            return None
        # So far it is the part's contribution to the mean over the whole step.
        norm = gradient_norm(self.parameters) / share
        return PartialGradient(square=norm.square(), share=share)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """L2 norm of all gradients together, shape (); where weights are shared out, of all ranks' shares."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients[0].device.type == "cpu":
        # torch's norm of a million numbers on a CPU is off by 1e-4; taken row by row it is exact to rounding.
        gradients = [torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients]
    return nn.utils.get_total_norm(gradients)
