"""Gradient traffic of DDP: how gradient buckets are averaged over ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in its stubs
from torch.nn.parallel import DistributedDataParallel

from trainer.formats.train_config import GradientDtype
from trainer.runtime.device_events import DeviceEvent, mark

DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Types in which gradients are sent, by their names in the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMeasurement:
    """Measurement of the gradients that this rank has sent."""

    squared_norm: torch.Tensor
    """Squared L2 norm of this rank's gradient, before it is averaged; shape ()."""
    gradients_sent: DeviceEvent | None
    """Event at which the last bucket was sent; None if none was."""


class GradientTraffic:
    """DDP communication hook that averages gradient buckets over all ranks.

    Each rank's gradient is divided by the number of ranks before the sum, which could
    overflow in 16 bits. Only the sums are in the gradient dtype: ``parameter.grad`` and
    the optimizer stay in fp32.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        dtype: GradientDtype,
        device: torch.device,
    ) -> None:
        self._dtype = DTYPES[dtype]
        self._device = device
        self._squared_norm = torch.zeros((), device=device)
        self._gradients_sent: DeviceEvent | None = None
        self.synchronise = True
        """False skips the all-reduce, to measure compute-only steps: weights then
        differ between ranks."""
        module.register_comm_hook(None, self._average)

    def take_measurement(self) -> TrafficMeasurement:
        """Return the measurement since the last call, and begin a new one."""
        measurement = TrafficMeasurement(
            squared_norm=self._squared_norm, gradients_sent=self._gradients_sent
        )
        self._squared_norm = torch.zeros((), device=self._device)
        self._gradients_sent = None
        return measurement

    def _average(
        self, _state: None, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; DDP calls this when its gradients are computed.

        Returns:
            A future of the averaged gradient, which is in the bucket's own memory.
        """
        gradient = bucket.buffer()
        # A dot product, as a square of every element would be a temporary.
        self._squared_norm += gradient.dot(gradient)
        self._gradients_sent = mark(self._device)

        def copy_to_bucket(future: torch.futures.Future[Any]) -> torch.Tensor:
            (average,) = future.value()
            return gradient if average is gradient else gradient.copy_(average)

        return self._start_all_reduce(gradient).then(copy_to_bucket)

    def _start_all_reduce(self, gradient: torch.Tensor) -> torch.futures.Future[Any]:
        """Start the all-reduce of a gradient, which may be overwritten.

        Returns:
            A future of a list with the average, in the gradient dtype.
        """
        # NCCL divides before it adds. gloo only adds.
        backend_divides = self.synchronise and self._device.type == "cuda"
        if not backend_divides:
            gradient.div_(dist.get_world_size())
        sent = self._in_gradient_dtype(gradient)
        if not self.synchronise:
            finished: torch.futures.Future[Any] = torch.futures.Future()
            finished.set_result([sent])
            return finished
        operation = dist.ReduceOp.AVG if backend_divides else dist.ReduceOp.SUM
        work: dist.Work = dist.all_reduce(sent, operation, async_op=True)
        return work.get_future()

    def _in_gradient_dtype(self, gradient: torch.Tensor) -> torch.Tensor:
        # Tests compare parallel strategies in fp64, which must not be rounded.
        if gradient.dtype == torch.float64:
            return gradient
        return gradient.to(self._dtype)
