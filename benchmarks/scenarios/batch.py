"""Scenarios of the micro-batch and the global batch."""

from dataclasses import replace

import numpy as np

from autotune.core.advice import Advice
from autotune.decide.advice import Situation
from autotune.decide.advice.apply import with_changes
from benchmarks.scenarios.situations import Benefit, Scenario, ran, rates, step_trial, tuned
from benchmarks.simulated_records import profile_of
from benchmarks.simulated_training import World, memory_bytes, settings, settings_with
from trainer.config import TrainConfig


def of_batch(gpu: World) -> tuple[Scenario, ...]:
    """Too small, too large, and more than fits."""
    small = settings(gpu, micro_batch_rows=2, global_batch_rows=256)
    large = settings(gpu, global_batch_rows=4096)
    fits = profile_of(gpu, large).evidence.probe
    assert fits is not None
    most = fits.feasible_max
    wide = settings(gpu, micro_batch_rows=64, global_batch_rows=4096)

    def with_peaks(now: Situation) -> Situation:
        return replace(now, trials=tuple(step_trial(gpu, large, rows) for rows in (8, 16, 32, 64, 128, 256, most - 10)))

    def memory(advice: Advice) -> float:
        after = with_changes(settings_with(large, micro_batch_rows=most - 10), advice.changes)
        return memory_bytes(gpu, large, after.micro_batch_rows) / memory_bytes(gpu, large, most - 10)

    return (
        Scenario(
            rule="beyond-memory", what="more rows than were shown to fit",
            speaks=lambda: tuned(gpu, large, micro_batch_rows=most + 5), silent=lambda: tuned(gpu, large),
        ),
        Scenario(
            rule="below-knee", what="two rows on a device that wants dozens", speaks=lambda: tuned(gpu, small),
            delivered=rates(gpu, small), silent=lambda: tuned(gpu, large, micro_batch_rows=64),
        ),
        Scenario(
            rule="beyond-knee", what="as many rows as fit, though a few are as fast",
            speaks=lambda: with_peaks(tuned(gpu, large, micro_batch_rows=most - 10)), delivered=memory,
            silent=lambda: tuned(gpu, large, micro_batch_rows=16),
        ),
        Scenario(
            rule="beyond-noise-scale", what="a noisy quadratic, descended with the best rate of each batch",
            speaks=lambda: ran(gpu, wide, noise_scale=2e5), delivered=_tokens_to_loss(gpu, wide, 2e5),
            silent=lambda: ran(gpu, wide, noise_scale=4e6),
        ),
    )  # fmt: skip


def _tokens_to_loss(gpu: World, train: TrainConfig, noise_scale: float) -> Benefit:
    """Tokens for each bit that the loss of a quadratic falls by a step with the best rate; the new batch to the old."""
    dimensions, tries = 200, 400

    def tokens(batch: float) -> float:
        draw = np.random.default_rng(0)
        place = np.ones(dimensions)  # of curvature 1, so this is the gradient as well
        # Noise whose covariance has the trace that makes the noise scale of the gradient here.
        spread = np.sqrt(noise_scale * np.square(place).sum() / dimensions)
        noisy = place + draw.normal(0, spread / np.sqrt(batch), (tries, dimensions))
        losses = [np.square(place - rate * noisy).sum(axis=1).mean() for rate in np.linspace(0.01, 1.5, 150)]
        return batch / float(np.square(place).sum() - min(losses))

    def delivered(advice: Advice) -> float:
        per_row = train.seq_length_tokens * gpu.packed_fill
        return tokens(advice.changes[0].new * per_row) / tokens(train.global_batch_rows * per_row)

    return delivered
