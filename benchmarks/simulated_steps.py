"""Simulated records of steps with one known cause of loss, on which the judgement of what limits a run is held.

They draw the parts of a step by the definitions that the judgement reads them by. So they test that noise, small
losses beside the large one, and misread waits do not mislead it; that the definitions fit, real trainings show
(``benchmarks.advice``). A step computes, waits for its loader, waits for gradients, updates, and spends some between
steps; one of these is drawn large, the others small as they are everywhere. What a record reads is that, times what
machines do to figures: noise that lasts for several steps, steps that something held up, and a first step that pays for
what is made once.
"""

import math
import random
from dataclasses import dataclass

from autotune.core.bottleneck import Cause
from autotune.decide.bottleneck import Counters
from trainer.record import StepRow

CAUSES: tuple[Cause, ...] = ("computation", "input", "padding", "network", "straggler", "host", "memory", "update")
LOSS_SHARE = (0.12, 0.7)
"""What the cause takes of the step."""
BACKGROUND_SHARE = (0.0, 0.08)
"""What each other one takes; so a run that computes may lose a quarter of its time to three small things."""
UPDATE_SHARE = (0.005, 0.08)
MISREAD = (0.85, 1.15)
"""A record has rank 0's waits for data and gradients, which other ranks' differ from."""
JITTER = (0.0, 0.04)
"""By how much some rank is slower than the median in a step, where none is slow."""
NOISE, PERSISTENCE = (0.01, 0.12), (0.0, 0.8)
"""Relative standard deviation of a step's parts, and how much of it the next step keeps."""
HELD_UP_PROBABILITY, HELD_UP_RATIO = 0.02, (1.2, 3.0)
STEPS = (12, 200)
RANKS = (1, 2, 8, 256)
PACKING = (0.955, 0.999)
"""How full packed rows are."""
MFU = (0.18, 0.6)
MISREADABLE = ("input", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A record and what is true of it."""

    cause: Cause
    world_size: int
    rows: tuple[StepRow, ...]
    counters: Counters | None


def simulated_run(seed: int) -> SimulatedRun:
    """One run; causes take turns."""
    draw = random.Random(seed)
    cause = CAUSES[seed % len(CAUSES)]
    world = draw.choice(RANKS[1:] if cause in ("network", "straggler") else RANKS)
    loss = draw.uniform(*LOSS_SHARE)
    shares = {one: draw.uniform(*BACKGROUND_SHARE) for one in ("input", "network", "host")}
    shares["update"] = draw.uniform(*UPDATE_SHARE)
    if world == 1:
        shares["network"] = 0.0
    straggle = 0.0
    full = draw.uniform(*PACKING)
    on_gpu = cause == "memory" or draw.random() < 0.6
    busy = draw.uniform(0.95, 1.0)
    if cause in ("input", "network", "update"):
        shares[cause] = loss
    elif cause == "host":
        split = draw.random() if on_gpu else 0.0  # seen as gaps inside of computing, or between steps
        shares["host"] = loss * (1 - split)
    elif cause == "straggler":
        straggle = loss
    computing = max(0.02, 1 - sum(shares.values()) - straggle)
    if cause == "host" and on_gpu:
        busy = max(0.05, 1 - loss * split / computing)
    if cause == "padding":
        full = max(0.2, 1 - loss / computing)
    counters = _counters(draw, cause, loss / (computing * busy), busy) if on_gpu else None
    rows = _rows(draw, shares, (computing, straggle, full), world, on_gpu=on_gpu)
    return SimulatedRun(cause=cause, world_size=world, rows=rows, counters=counters)


def _counters(draw: random.Random, cause: Cause, waiting: float, busy: float) -> Counters:
    tensor = draw.uniform(0.1, 0.5)
    if cause == "memory":
        tensor = min(tensor, max(0.05, 0.98 - waiting))
        memory = min(0.99, tensor + waiting)
    else:
        memory = draw.uniform(0.5, 1.0) * tensor
    return Counters(busy_share=busy, tensor_share=tensor, memory_share=memory, source="simulated counters")


def _rows(
    draw: random.Random, shares: dict[str, float], work: tuple[float, float, float], world: int, *, on_gpu: bool
) -> tuple[StepRow, ...]:
    computing, straggle, full = work
    step_s = math.exp(draw.uniform(math.log(0.05), math.log(8.0)))
    noise, keeps = draw.uniform(*NOISE), draw.uniform(*PERSISTENCE)
    shares = {name: share * (draw.uniform(*MISREAD) if name in MISREADABLE else 1.0) for name, share in shares.items()}
    jitter = draw.uniform(*JITTER)
    slow_rank = draw.randrange(world)
    mfu = draw.uniform(*MFU) * computing if on_gpu else None
    state = dict.fromkeys((*shares, "computing", "straggle"), 0.0)
    rows = []
    for number in range(1, draw.randint(*STEPS) + 1):
        for name in state:
            state[name] = keeps * state[name] + math.sqrt(1 - keeps**2) * draw.gauss(0, noise)
        held = draw.uniform(*HELD_UP_RATIO) if draw.random() < HELD_UP_PROBABILITY else 1.0
        first = 4.0 if number == 1 else 1.0
        parts = {name: step_s * share * math.exp(state[name]) for name, share in shares.items()}
        parts["host"] *= held
        compute_s = step_s * computing * math.exp(state["computing"]) * first
        waits_s = step_s * straggle * math.exp(state["straggle"])
        own_s = compute_s + (waits_s if slow_rank == 0 else 0.0)
        others_s = 0.0 if slow_rank == 0 else waits_s
        ratio = 1 + (waits_s / compute_s if straggle else abs(draw.gauss(0, jitter)))
        whole_s = sum(parts.values()) + own_s + others_s
        slowest = slow_rank if straggle else draw.randrange(world)
        told = (slowest, ratio) if world > 1 else (None, None)
        rows.append(_row(number, (whole_s, own_s, others_s), parts, (round(65_536 * world), full, world, mfu), told))
    return tuple(rows)


def _row(
    number: int,
    times_s: tuple[float, float, float],
    parts: dict[str, float],
    facts: tuple[int, float, int, float | None],
    slowest: tuple[int | None, float | None],
) -> StepRow:
    """A row of a step, its own and others' computing; of so many places so full on so many ranks."""
    (step_s, compute_s, others_s), (slots, full, world, mfu) = times_s, facts
    real = round(slots * full)
    return StepRow(
        step=number, loss=5.0, grad_norm=1.0, learning_rate=1e-4, step_s=step_s, data_wait_s=parts["input"],
        compute_s=compute_s, communication_s=parts["network"] + others_s, optimizer_s=parts["update"],
        real_tokens=real, slot_tokens=slots, packing_efficiency=real / slots, real_tokens_per_s=real / step_s,
        real_tokens_per_s_per_rank=real / step_s / world, slot_tokens_per_s=slots / step_s,
        slot_tokens_per_s_per_rank=slots / step_s / world, model_flops_per_s_per_rank=(mfu or 0.1) * 1e15, mfu=mfu,
        mfu_6n=mfu, peak_memory_bytes=2**33, gradient_noise_scale_tokens=None, head_overflows=0, recompilations=0,
        skipped_steps=0, slowest_rank=slowest[0], slowest_rank_ratio=slowest[1],
    )  # fmt: skip
