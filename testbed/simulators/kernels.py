"""The kernels of a simulated micro-batch.

Each has what it multiplies and moves, on devices as their data sheets describe them. A
kernel here stands for the few small ones that a framework launches for it. Matmuls take
as long as multiplying or moving does, whichever is longer; everything else moves bytes.
Each takes a moment more to begin and to end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LAYER_FORWARD = ("mix", "attention", "mix_out", "moves", "up", "moves", "down", "moves")
LAYER_BACKWARD = (
    "moves",
    "down",
    "down",
    "moves",
    "up",
    "up",
    "moves",
    "mix_out",
    "mix_out",
    "attention",
    "mix",
    "mix",
)
"""Backward has two products for each of forward's: one for what came in, one for the
weights."""
HEAD_FORWARD, HEAD_BACKWARD = (
    ("transform", "logits", "loss"),
    ("loss", "logits", "logits", "transform", "transform"),
)
MOVES_PER_LAYER = (LAYER_FORWARD + LAYER_BACKWARD).count("moves")
BYTES_PER_LOGIT = 14.0
"""Moved for the loss, forward and backward: logits are kept, exponentiated, and their
gradient is written."""
ATTENTION_REACH = 0.6
"""Of what products of matrices reach: softmax lies between attention's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device with its peak FLOP/s and its memory."""

    name: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    on_gpu: bool
    has_counters: bool
    """GPM came with Hopper."""
    ramp_s: float
    """Of a kernel, before all of the device works and after some of it has ended."""


DEVICES = (
    Device(
        name="NVIDIA H100 NVL",
        peak_flops_per_s=835e12,
        memory_bytes_per_s=3.9e12,
        on_gpu=True,
        has_counters=True,
        ramp_s=3e-6,
    ),
    Device(
        name="NVIDIA H200",
        peak_flops_per_s=989e12,
        memory_bytes_per_s=4.8e12,
        on_gpu=True,
        has_counters=True,
        ramp_s=3e-6,
    ),
    Device(
        name="NVIDIA A100-SXM4-80GB",
        peak_flops_per_s=312e12,
        memory_bytes_per_s=2.0e12,
        on_gpu=True,
        has_counters=False,
        ramp_s=3e-6,
    ),
    Device(
        name="cpu",
        peak_flops_per_s=1.6e12,
        memory_bytes_per_s=1.2e11,
        on_gpu=False,
        has_counters=False,
        ramp_s=1e-5,
    ),
)
"""Dense bf16 peaks and bandwidths of data sheets; the CPU is a server's of 16 cores, in
fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and its micro-batch on a device."""

    device: Device
    layers: int
    hidden: int
    vocab_size: int
    rows: int
    seq_length_tokens: int
    attended_tokens: float
    """By a token: its sample, or the whole row."""
    moved_bytes: float
    """By one layer outside of its products, forward and backward, for each element of
    its hidden state."""
    product_reach: float
    """Of the peak, by products of matrices."""
    memory_reach: float
    """Of the bandwidth, by kernels that move."""
    busy_share: float
    """Of multiprocessors, within a kernel: waves of blocks end unevenly."""
    predicted_share: float
    """Of places, that the head computes."""

    @property
    def parameters(self) -> int:
        """Of the model."""
        body = self.layers * 12 * self.hidden**2
        return body + self.hidden * (
            self.vocab_size + self.seq_length_tokens + self.hidden
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Of one micro-batch, in order."""

    multiplying_s: Floats
    """Least time of each by its products."""
    moving_s: Floats
    """Least time by the bytes that it moves."""
    ramp_s: float
    in_head: npt.NDArray[np.bool_]
    """Grows with places to predict, not with all places."""
    forward: int
    """So many are forward's."""
    layer_ends: tuple[int, ...]
    """Kernels after which backward is through with a layer; the last one ends the
    micro-batch."""
    flops: Floats
    bytes: Floats
    busy_share: float
    on_gpu: bool

    def seconds(self, *, memory_is_free: bool = False) -> Floats:
        """Return the seconds of each kernel."""
        moving = np.zeros_like(self.moving_s) if memory_is_free else self.moving_s
        return self.ramp_s + np.maximum(self.multiplying_s, moving)


def kernels_of(shape: Shape) -> Kernels:
    """Forward through layers and head, and backward."""
    names = [(name, False) for name in LAYER_FORWARD * shape.layers]
    names += [(name, True) for name in HEAD_FORWARD]
    forward = len(names)
    names += [(name, True) for name in HEAD_BACKWARD]
    head_end = len(names)
    names += [(name, False) for name in LAYER_BACKWARD * shape.layers]
    ends = tuple(
        head_end + number * len(LAYER_BACKWARD) for number in range(1, shape.layers + 1)
    )
    work = [
        _work(shape, name, backward=number >= forward)
        for number, (name, _) in enumerate(names)
    ]
    flops, moved = (np.array(column) for column in zip(*work, strict=True))
    device = shape.device
    attention = np.array([name == "attention" for name, _ in names])
    reach = np.where(attention, ATTENTION_REACH, 1.0) * shape.product_reach
    return Kernels(
        multiplying_s=flops / (device.peak_flops_per_s * reach),
        moving_s=moved / (device.memory_bytes_per_s * shape.memory_reach),
        ramp_s=device.ramp_s,
        in_head=np.array([in_head for _, in_head in names]),
        forward=forward,
        layer_ends=ends,
        flops=flops,
        bytes=moved,
        busy_share=shape.busy_share,
        on_gpu=device.on_gpu,
    )


def _work(shape: Shape, name: str, *, backward: bool) -> tuple[float, float]:
    """Return FLOPs, and bytes moved."""
    tokens, hidden, width = (
        shape.rows * shape.seq_length_tokens,
        shape.hidden,
        2 if shape.device.on_gpu else 4,
    )
    places = tokens * shape.predicted_share
    matmuls = {"mix": 3, "mix_out": 1, "up": 4, "down": 4}
    if name in matmuls:
        ratio = matmuls[name]
        return 2.0 * ratio * hidden**2 * tokens, width * (
            tokens * hidden * (1 + ratio) + ratio * hidden**2
        )
    if name == "attention":
        # Backward computes the scores again.
        return (
            10.0 if backward else 4.0
        ) * hidden * shape.attended_tokens * tokens, width * 4.0 * tokens * hidden
    if name == "moves":
        return 0.0, shape.moved_bytes / MOVES_PER_LAYER * tokens * hidden
    if name == "loss":
        return 0.0, BYTES_PER_LOGIT / 2 * places * shape.vocab_size
    columns = shape.vocab_size if name == "logits" else hidden
    return 2.0 * hidden * columns * places, width * (
        places * (hidden + columns) + hidden * columns
    )
