import numpy as np
import pytest

from trainer.meter import NoiseScale


def test_the_noise_scale_of_made_up_gradients_is_found_again():
    """Gradients of single tokens with a known mean and variance; parts and wholes are their means."""
    random = np.random.default_rng(0)
    signal = random.normal(size=50)
    noise, tokens, parts = 30.0, 400, 8
    truth = 50 * noise**2 / float(signal @ signal)
    scale = NoiseScale()
    for _ in range(300):
        part_means = signal + noise * random.normal(size=(parts, 50)) / np.sqrt(tokens / parts)
        whole = part_means.mean(axis=0)
        scale.update(float(whole @ whole), float(np.square(part_means).sum(axis=1).mean()), 1 / parts, tokens)
    # Smoothing looks back ten steps, so single figures scatter.
    assert scale.tokens == pytest.approx(truth, rel=0.6)


def test_nothing_is_said_before_anything_is_known_or_when_noise_hides_the_signal():
    scale = NoiseScale()
    assert scale.tokens is None
    scale.update(1.0, 10.0, 0.5, 100)
    assert scale.tokens is None
    for _ in range(3):
        scale.update(9.0, 10.0, 0.5, 100)
    assert scale.tokens is not None
    assert scale.tokens > 0
