"""Simulated machines that train: their draw.

Every part of a machine is healthy or pressed. One is pressed by intent, each other one
by chance; whether it is then what limits the training is not decided here, but found by
taking it away (``testbed.simulators.runs``).
"""

import math
from dataclasses import dataclass

import numpy as np

from autotune.evidence.advice import Cause
from testbed.simulators.kernels import (
    DEVICES,
    Device,
    Floats,
    Kernels,
    Shape,
    kernels_of,
)
from testbed.simulators.noise import log_uniform
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

CAUSES: tuple[Cause, ...] = (
    "compute",
    "data loading",
    "padding",
    "network",
    "straggler",
    "launch-bound",
    "memory",
    "optimizer step",
)
ALSO_PRESSED_PROBABILITY = 0.08
"""Of each part beside the one that is pressed by intent."""
WORLDS, WORLD_WEIGHTS, RANKS_PER_NODE = (1, 2, 8, 64), (0.3, 0.25, 0.3, 0.15), 8
STEPS, MOST_STEPS_OF_64 = {1: (24, 100), 10: (60, 140)}, 80
"""By the interval of logging."""
DEVICE_WEIGHTS = (0.3, 0.2, 0.2, 0.3)
LAYERS, HIDDEN, VOCAB_SIZES, ROW_TOKENS = (
    (4, 6, 8),
    (512, 768, 1024, 1536),
    (4096, 16_384, 30_522),
    (128, 512),
)
MICRO_BATCHES = (1, 2, 4)
TOKENS_PER_MICROBATCH = {True: (4096, 65_536), False: (512, 4096)}
"""On GPUs, and on CPUs; log-uniform, as all ranges of ratios below."""
MOVED_BYTES = {"fused": (40.0, 70.0), "eager": (90.0, 140.0), "pressed": (160.0, 320.0)}
"""Of a layer for each element of its hidden state in 16 bits: compiled, as PyTorch
computes it, and with casts and masks that nobody fused."""
FUSED_PROBABILITY = 0.6
PRODUCT_REACH, MEMORY_REACH, BUSY_SHARE = (0.6, 0.8), (0.75, 0.92), (0.88, 0.98)
LAUNCHES = {False: (0.05, 0.6), True: (1.15, 3.0)}
CPU_LAUNCHES = 0.05
"""Time of the host for all launches, to the device's for all kernels; here as below
healthy, and pressed."""
SUPPLY = {False: (0.03, 0.6), True: (1.15, 3.0)}
"""Time of all loader workers for a batch, to the device's for the step."""
SERIAL_SUPPLY = {False: (0.01, 0.05), True: (0.15, 2.0)}
"""The same where the trainer makes batches itself, and a CPU does nothing meanwhile."""
WORKERS, PREFETCH = (0, 1, 2, 4, 8), (2, 4)
SUPPLY_KINDS = ("workers", "storage", "one rank", "bursts")
MAKE_DEVIATION = (0.05, 0.6)
BURST_PROBABILITY, BURST_STEPS = (0.02, 0.1), (3.0, 12.0)
"""Batches that storage holds up, and for how many steps."""
FILL = {"packed": (0.95, 0.999), "bucketed": (0.75, 0.97), "padded": (0.25, 0.9)}
UNEVEN_WIDTHS = (0.01, 0.08)
"""Relative deviation of the places of a rank's step, where rows are as wide as what
they hold."""
RING = {False: (0.02, 0.6), True: (0.8, 5.0)}
"""Time of all gradients on their way, to that of one backward, times micro-batches
where it is pressed."""
RING_DEVIATION, LATENCY_S = (0.02, 0.3), (1e-5, 1e-4)
SLOW = {False: (1.0, 1.04), True: (1.13, 2.2)}
"""Time of the slowest rank, divided by that of the others."""
PHASES_PROBABILITY, PHASE_STEPS = 0.3, (4, 30)
"""Slow ranks that are slow for a while, and then not."""
JITTER, PERSISTENCE = (0.002, 0.02), (0.0, 0.9)
UPDATE = {False: (0.003, 0.06), True: (0.15, 1.5)}
"""To forward and backward of a step."""
BETWEEN = {False: (0.0005, 0.03), True: (0.15, 1.0)}
BETWEEN_ON_GPU = 2.0
"""Of the host, between steps, to the device's time for a step; more where pressed on
GPUs, where the host is ahead."""
SAVES_PROBABILITY, SAVE_INTERVAL_STEPS, SAVE = (
    0.3,
    (8, 40),
    {False: (0.05, 0.5), True: (0.2, 1.0)},
)
"""A save stops the device: the healthy range is in steps, the pressed one in steps
times its interval."""
HELD_UP_PROBABILITY, HELD_UP_STEPS = (0.0, 0.02), (0.2, 2.0)
"""Steps in which something holds up one rank's host."""
FIRST_STEP = (2.0, 8.0)
"""Time of the first step, divided by that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoader:
    """A rank's loader; seconds are of one micro-batch."""

    workers: int
    prefetch: int
    make_s: float
    make_deviation: float
    storage_s: float
    """Of reading, one after the other for all workers."""
    burst_probability: float
    burst_s: float
    slow_rank: int | None
    slow_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much ranks and steps differ."""

    jitter: float
    persistence: float
    slow_rank: int
    slow_ratio: float
    phase_steps: int | None
    """None for a rank that is always slow."""
    held_up_probability: float
    first_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Work of a rank's program in addition to loading batches."""

    launch_s: float
    """Of a kernel."""
    between_s: float
    """At every logged step."""
    save_interval_steps: int | None
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that is true of a training."""

    train: TrainConfig
    shape: Shape
    kernels: Kernels
    world_size: int
    steps: int
    micro_batches: int
    host: Host
    supply: MicroBatchLoader
    fill: float
    fill_deviation: float
    uneven_widths: float
    latency_s: float
    bucket_ends: tuple[int, ...]
    """Kernels after which each bucket of gradients is ready."""
    bucket_s: Floats
    """On its way round the ring."""
    ring_deviation: float
    pace: Pace
    optimizer_step_s: float

    @property
    def device(self) -> Device:
        """Of every rank."""
        return self.shape.device

    @property
    def local_ranks(self) -> int:
        """Of a node."""
        return min(self.world_size, RANKS_PER_NODE)


def draw_machine(cause: Cause, draw: np.random.Generator) -> Machine:
    """Return a machine on which this is pressed, and each other thing by chance.

    For computing, nothing is pressed by intent.
    """
    by_chance = 0.0 if cause == "compute" else ALSO_PRESSED_PROBABILITY
    pressed = {
        candidate: candidate == cause or draw.random() < by_chance
        for candidate in CAUSES
    }
    world = _world_size(cause, draw)
    shape = _shape(cause, pressed["memory"], draw)
    kernels = kernels_of(shape)
    micro_batches, log_interval = (
        int(draw.choice(MICRO_BATCHES)),
        int(draw.choice(tuple(STEPS))),
    )
    compute_s = float(kernels.seconds().sum())
    step_s = micro_batches * compute_s
    steps = int(log_uniform(draw, STEPS[log_interval]))
    supply = _supply(
        pressed["data loading"], world, shape.device, (step_s, micro_batches), draw
    )
    layout = (
        str(draw.choice(("padded", "bucketed"), p=(0.7, 0.3)))
        if pressed["padding"]
        else "packed"
    )
    ends, bucket_s = _buckets(
        pressed["network"], kernels, compute_s, micro_batches, draw
    )
    return Machine(
        train=_settings(
            shape, layout, supply, (shape.rows * micro_batches * world, log_interval)
        ),
        shape=shape,
        kernels=kernels,
        world_size=world,
        steps=min(steps, MOST_STEPS_OF_64) if world > RANKS_PER_NODE else steps,
        micro_batches=micro_batches,
        host=_host(pressed["launch-bound"], kernels, step_s, log_interval, draw),
        supply=supply,
        fill=draw.uniform(*FILL[layout]),
        fill_deviation=0.002 if layout == "packed" else 0.4 / math.sqrt(shape.rows),
        uneven_widths=draw.uniform(*UNEVEN_WIDTHS) if layout == "bucketed" else 0.0,
        latency_s=log_uniform(draw, LATENCY_S),
        bucket_ends=ends,
        bucket_s=bucket_s,
        ring_deviation=log_uniform(draw, RING_DEVIATION),
        pace=_pace(pressed["straggler"], world, draw),
        optimizer_step_s=step_s * log_uniform(draw, UPDATE[pressed["optimizer step"]]),
    )


def _world_size(cause: Cause, draw: np.random.Generator) -> int:
    least = 2 if cause in ("network", "straggler") else 1
    weights = np.array(
        [
            weight * (world >= least)
            for world, weight in zip(WORLDS, WORLD_WEIGHTS, strict=True)
        ]
    )
    return int(draw.choice(WORLDS, p=weights / weights.sum()))


def _host(
    pressed: bool,
    kernels: Kernels,
    step_s: float,
    log_interval: int,
    draw: np.random.Generator,
) -> Host:
    on_gpu = kernels.on_gpu
    kind = str(
        draw.choice(
            ("launches", "saves", "rows"),
            p=(0.5, 0.25, 0.25) if on_gpu else (0.0, 0.5, 0.5),
        )
    )
    by_launches, by_saves, by_rows = (
        pressed and kind == chosen_kind for chosen_kind in ("launches", "saves", "rows")
    )
    launches = log_uniform(draw, LAUNCHES[by_launches]) if on_gpu else CPU_LAUNCHES
    interval = int(log_uniform(draw, SAVE_INTERVAL_STEPS))
    save = log_uniform(draw, SAVE[by_saves]) * (interval if by_saves else 1.0)
    between = log_uniform(draw, BETWEEN[by_rows]) * (
        BETWEEN_ON_GPU if by_rows and on_gpu else 1.0
    )
    return Host(
        launch_s=launches * float(kernels.seconds().mean()),
        between_s=step_s * log_interval * between,
        save_interval_steps=(
            interval if by_saves or draw.random() < SAVES_PROBABILITY else None
        ),
        save_s=step_s * save,
    )


def _shape(cause: Cause, memory_is_pressed: bool, draw: np.random.Generator) -> Shape:
    # Only counters tell memory: without them there is nothing to be found.
    devices, weights = (
        (DEVICES[:2], (0.5, 0.5)) if cause == "memory" else (DEVICES, DEVICE_WEIGHTS)
    )
    device = devices[int(draw.choice(len(devices), p=weights))]
    kind = (
        "pressed"
        if memory_is_pressed
        else "fused"
        if draw.random() < FUSED_PROBABILITY
        else "eager"
    )
    seq_length_tokens = int(draw.choice(ROW_TOKENS))
    tokens = log_uniform(draw, TOKENS_PER_MICROBATCH[device.on_gpu])
    return Shape(
        device=device,
        layers=int(draw.choice(LAYERS)),
        hidden=int(draw.choice(HIDDEN)),
        vocab_size=int(draw.choice(VOCAB_SIZES)),
        rows=max(1, round(tokens / seq_length_tokens)),
        seq_length_tokens=seq_length_tokens,
        attended_tokens=min(190.0, float(seq_length_tokens)),
        moved_bytes=draw.uniform(*MOVED_BYTES[kind]) * (1.0 if device.on_gpu else 2.0),
        product_reach=draw.uniform(*PRODUCT_REACH),
        memory_reach=draw.uniform(*MEMORY_REACH),
        busy_share=draw.uniform(*BUSY_SHARE),
        predicted_share=0.15,
    )


def _supply(
    pressed: bool,
    world: int,
    device: Device,
    step: tuple[float, int],
    draw: np.random.Generator,
) -> MicroBatchLoader:
    step_s, micro_batches = step
    workers = int(draw.choice(WORKERS))
    kinds = [
        kind
        for kind in SUPPLY_KINDS
        if (world > 1 or kind != "one rank") and (workers or kind != "bursts")
    ]
    kind = str(draw.choice(kinds)) if pressed else "none"
    serial = not workers and not device.on_gpu
    ranges = SERIAL_SUPPLY if serial else SUPPLY
    healthy, starved = (
        step_s / micro_batches * log_uniform(draw, ranges[is_pressed])
        for is_pressed in (False, True)
    )
    return MicroBatchLoader(
        workers=workers,
        prefetch=int(draw.choice(PREFETCH)),
        make_s=max(1, workers) * (starved if kind == "workers" else healthy),
        make_deviation=draw.uniform(*MAKE_DEVIATION),
        storage_s=starved if kind == "storage" else 0.1 * healthy,
        burst_probability=draw.uniform(*BURST_PROBABILITY) if kind == "bursts" else 0.0,
        burst_s=step_s * draw.uniform(*BURST_STEPS),
        slow_rank=int(draw.integers(world)) if kind == "one rank" else None,
        slow_ratio=starved / healthy,
    )


def _buckets(
    pressed: bool,
    kernels: Kernels,
    compute_s: float,
    micro_batches: int,
    draw: np.random.Generator,
) -> tuple[tuple[int, ...], Floats]:
    ends = kernels.layer_ends
    count = int(draw.integers(1, len(ends) + 1))
    chosen = sorted(
        {ends[round((number + 1) * len(ends) / count) - 1] for number in range(count)}
    )
    # The table of embeddings comes last, and is large.
    shares = draw.uniform(0.5, 1.5, len(chosen)) + np.eye(len(chosen))[
        -1
    ] * draw.uniform(0, 2)
    ring_s = (
        2
        / 3
        * compute_s
        * log_uniform(draw, RING[pressed])
        * (micro_batches if pressed else 1)
    )
    return tuple(chosen), ring_s * shares / shares.sum()


def _pace(pressed: bool, world: int, draw: np.random.Generator) -> Pace:
    phases = pressed and draw.random() < PHASES_PROBABILITY
    return Pace(
        jitter=log_uniform(draw, JITTER),
        persistence=draw.uniform(*PERSISTENCE),
        slow_rank=int(draw.integers(world)),
        slow_ratio=draw.uniform(*SLOW[pressed]) if world > 1 else 1.0,
        phase_steps=int(log_uniform(draw, PHASE_STEPS)) if phases else None,
        held_up_probability=draw.uniform(*HELD_UP_PROBABILITY),
        first_step=draw.uniform(*FIRST_STEP),
    )


def _settings(
    shape: Shape, layout: str, supply: MicroBatchLoader, batch: tuple[int, int]
) -> TrainConfig:
    global_batch_size, log_interval = batch
    on_gpu = shape.device.on_gpu
    model = {
        "model_type": "bert",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
    }
    return TrainConfig.model_validate(
        {
            "model": ModelSettings(name="simulated", config=model).model_dump(),
            "seq_length_tokens": shape.seq_length_tokens,
            "layout": layout,
            "micro_batch_size": shape.rows,
            "global_batch_size": global_batch_size,
            "last_layer": "dense",
            "precision": "bf16" if on_gpu else "fp32",
            "device": "cuda" if on_gpu else "cpu",
            "data": (
                DataSettings(
                    num_workers=supply.workers, prefetch_factor=supply.prefetch
                ).model_dump()
            ),
            "log_interval_steps": log_interval,
        }
    )
