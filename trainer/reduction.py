"""How DDP's gradients travel: in 32 or 16 bits, their norm taken on the way, and the last one's departure marked."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # there, though not in its list of names
from torch.nn.parallel import DistributedDataParallel

from trainer.config import GradientDtype
from trainer.stopwatch import Mark, mark

TRAVEL_DTYPES: dict[GradientDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradientTraffic:
    """DDP's communication hook: averages buckets over all ranks.

    In 16 bits each rank's part is divided before it is rounded, so sums stay in range; the weights' own gradients and
    the optimizer keep 32 bits.

    Args:
        module: Gets the hook.
        dtype: What gradients travel as.
        device: Of the gradients.
    """

    def __init__(self, module: DistributedDataParallel, dtype: GradientDtype, device: torch.device) -> None:
        self._dtype = TRAVEL_DTYPES[dtype]
        self._device = device
        self._square = torch.zeros((), device=device)
        self._departed: Mark | None = None
        self.travels = True
        """False keeps every rank's gradients where they are, and does all else: what a step costs but for the network.
        Weights then differ from rank to rank; for measurements only."""
        module.register_comm_hook(None, self._send)

    def take(self) -> tuple[torch.Tensor, Mark | None]:
        """What the last synchronised backward was on this rank.

        Returns:
            The squared L2 norm of this rank's own gradient, shape (), and the moment when the last bucket left: what
            follows until the end of backward is waiting for the network.
        """
        square, self._square = self._square, torch.zeros((), device=self._device)
        departed, self._departed = self._departed, None
        return square, departed

    def _send(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
        self._square += gradient.square().sum()
        self._departed = mark(self._device)
        gradient.div_(dist.get_world_size())
        travelling = gradient if gradient.dtype == torch.float64 else gradient.to(self._dtype)

        def arrived(future: torch.futures.Future[Any]) -> torch.Tensor:
            reduced: torch.Tensor = future.value()[0]
            return gradient if reduced is gradient else gradient.copy_(reduced)

        if not self.travels:
            stayed: torch.futures.Future[Any] = torch.futures.Future()
            stayed.set_result([travelling])
            return stayed.then(arrived)
        sent: torch.futures.Future[torch.Tensor] = dist.all_reduce(travelling, async_op=True).get_future().then(arrived)
        return sent
