"""Gradient traffic of DDP: how gradient buckets are averaged over ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its stubs
from torch.nn.parallel import DistributedDataParallel

from trainer.config.train_config import GradientDtype
from trainer.distributed.device_events import DeviceEvent, mark

DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentGradients:
    """What this rank has sent since the last reading."""

    square: torch.Tensor
    """Squared norm of this rank's gradient, shape ()."""
    departed: DeviceEvent | None
    """Event before this rank waits for the last all-reduce; None if nothing was
    sent."""


class GradientTraffic:
    """DDP communication hook that averages gradient buckets over all ranks.

    With a 16-bit gradient dtype, gradients are divided before they are added, so that
    sums stay in range; ``parameter.grad`` and the optimizer stay in 32 bits.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        dtype: GradientDtype,
        device: torch.device,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._device = device
        self._square = torch.zeros((), device=device)
        self._departed: DeviceEvent | None = None
        self.synchronise = True
        """False skips the all-reduce, to measure compute-only steps: weights then
        differ between ranks."""
        module.register_comm_hook(None, self._average)

    def take(self) -> SentGradients:
        """Return what was sent since the last call, and begin again."""
        sent = SentGradients(square=self._square, departed=self._departed)
        self._square = torch.zeros((), device=self._device)
        self._departed = None
        return sent

    def _average(
        self, _: object, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the all-reduce of a bucket; the result is the averaged gradient."""
        gradient = bucket.buffer()
        # A dot product, as a square of every element would be a temporary.
        self._square += gradient.dot(gradient)
        self._departed = mark(self._device)
        # NCCL divides on the way; gloo cannot.
        backend_divides = self.synchronise and self._device.type == "cuda"
        if not backend_divides:
            gradient.div_(dist.get_world_size())
        sent = gradient
        if gradient.dtype != torch.float64:
            sent = gradient.to(self._dtype)

        def receive(future: torch.futures.Future[Any]) -> torch.Tensor:
            (reduced,) = future.value()
            return gradient if reduced is gradient else gradient.copy_(reduced)

        future: torch.futures.Future[Any] = torch.futures.Future()
        if self.synchronise:
            operation = dist.ReduceOp.AVG if backend_divides else dist.ReduceOp.SUM
            future = dist.all_reduce(sent, operation, async_op=True).get_future()
        else:
            future.set_result([sent])
        return future.then(receive)
