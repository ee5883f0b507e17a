import numpy as np
import pytest

from trainer.record.noise_scale import NoiseScale


def test_estimates_noise_scale_of_known_gradients():
    random = np.random.default_rng(0)
    weights = 50
    tokens_per_step = 40_000
    parts = 8
    tokens_per_part = tokens_per_step / parts
    # A token's gradient is the true gradient plus noise with this standard deviation,
    # and the mean over n tokens has noise of sigma / sqrt(n).
    true_gradient = random.normal(size=weights)
    sigma = 30.0
    # The noise scale is the ratio of the noise of a token, its variance over all
    # weights, to the signal, the squared norm of the true gradient.
    signal = float(true_gradient @ true_gradient)
    noise = weights * sigma**2
    scale = NoiseScale()
    for _ in range(300):
        part_noise = random.normal(size=(parts, weights)) / np.sqrt(tokens_per_part)
        part_gradients = true_gradient + sigma * part_noise
        whole_gradient = part_gradients.mean(axis=0)
        scale.update(
            whole_square=float(whole_gradient @ whole_gradient),
            part_square=float(np.square(part_gradients).sum(axis=1).mean()),
            part_share=1 / parts,
            tokens=tokens_per_step,
        )
    # A step estimates the noise from the variance of 8 parts in 50 dimensions, with a
    # standard deviation of sqrt(2 / (50 * 7)) = 8 %, and the signal with one of
    # 2 sigma / sqrt(tokens_per_step * signal) = 5 %. Smoothing averages about 19 steps,
    # which leaves 2 % and 1 %. The tolerance is four standard deviations of the ratio.
    assert scale.tokens == pytest.approx(noise / signal, rel=0.08)


def test_noise_scale_is_unknown_at_first():
    assert NoiseScale().tokens is None


def test_noise_scale_is_unknown_below_the_noise():
    scale = NoiseScale()
    # Half of the tokens have a gradient of ten times the squared norm, so that the
    # estimate of the signal is negative: 2 x 1 - 10.
    scale.update(whole_square=1.0, part_square=10.0, part_share=0.5, tokens=100)
    assert scale.tokens is None
