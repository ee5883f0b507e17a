import numpy as np
import pytest

from trainer.record.noise_scale import NoiseScale


def test_estimates_noise_scale_of_known_gradients():
    random = np.random.default_rng(0)
    weights = 50
    tokens = 40_000
    parts = 8
    # A token's gradient is the true gradient plus noise of this standard deviation, so
    # the mean of a part's tokens has noise of sigma / sqrt(tokens in the part).
    true_gradient = random.normal(size=weights)
    sigma = 30.0
    expected_tokens = weights * sigma**2 / float(true_gradient @ true_gradient)
    scale = NoiseScale()
    for _ in range(300):
        deviations = random.normal(size=(parts, weights)) / np.sqrt(tokens / parts)
        part_means = true_gradient + sigma * deviations
        whole_mean = part_means.mean(axis=0)
        scale.update(
            whole_square=float(whole_mean @ whole_mean),
            part_square=float(np.square(part_means).sum(axis=1).mean()),
            part_share=1 / parts,
            tokens=tokens,
        )
    # Both values have chi-squared noise. A step's estimate of S, from the variance of
    # 8 parts in 50 dimensions, has a standard deviation of sqrt(2 / (50 * 7)) = 8 %,
    # and that of G² one of 2 sigma / sqrt(tokens) / |G| = 5 %. Smoothing averages about
    # 19 steps: 2 % and 1 %. The tolerance is four standard deviations of their ratio.
    assert scale.tokens == pytest.approx(expected_tokens, rel=0.08)


def test_noise_scale_is_unknown_at_first():
    assert NoiseScale().tokens is None


def test_noise_scale_is_unknown_below_the_noise():
    scale = NoiseScale()
    # A half with ten times the whole's square is all noise: G² = 2 x 1 - 10 < 0.
    scale.update(whole_square=1.0, part_square=10.0, part_share=0.5, tokens=100)
    assert scale.tokens is None
