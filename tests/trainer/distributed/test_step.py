import math

import pytest
import torch
from torch import nn

from tests.trainer import oracles
from trainer.distributed.step import gradient_norm
from trainer.health.monitor import NO_LIMITS, Limits

LEARNING_RATE = 1e-3
"""Any rate that changes the weights."""
FP32_ROUNDING = 1e-6
"""Relative error of fp32 sums in another order: about ten times the smallest step of
fp32, which is 1.2e-7."""


@pytest.mark.parametrize(
    "micro_batch_size",
    [
        pytest.param(4, id="two micro-batches"),
        pytest.param(3, id="three, the last one smaller"),
        pytest.param(1, id="eight"),
    ],
)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(
    dataset, micro_batch_size, layout
):
    whole = oracles.config_of(layout=layout, micro_batch_size=8)
    accumulated = oracles.config_of(layout=layout, micro_batch_size=micro_batch_size)
    oracles.check_alike(
        oracles.learned(accumulated, dataset), oracles.learned(whole, dataset)
    )


def test_gradient_is_clipped_to_its_largest_norm(dataset):
    _, gradients = oracles.learned(oracles.config_of(), dataset)
    norm = oracles.norm_of(gradients)
    config = oracles.config_of(max_grad_norm=norm / 4)
    _, clipped = oracles.learned(config, dataset)
    # Clipping adds 1e-6 to the norm, as torch's does: less than 1e-5 of any norm above
    # 0.1.
    assert norm > 0.1
    assert oracles.norm_of(clipped) == pytest.approx(norm / 4, rel=1e-5)


def test_norm_before_clipping_is_reported(dataset):
    _, gradients = oracles.learned(oracles.config_of(), dataset)
    norm = oracles.norm_of(gradients)
    config = oracles.config_of(max_grad_norm=norm / 4)
    training = oracles.training_of(config, dataset)
    result = training.step.run(oracles.micro_batches(dataset, config), lr=0.0)
    assert float(result.grad_norm) == pytest.approx(norm, rel=FP32_ROUNDING)


def test_norm_of_a_large_gradient_is_exact():
    # Five million numbers, of which torch's own norm on a CPU is off by 1e-4.
    parameter = nn.Parameter(torch.zeros(20_000, 256))
    generator = torch.Generator().manual_seed(0)
    parameter.grad = torch.randn(20_000, 256, generator=generator)
    expected = float(parameter.grad.double().norm())
    norm = float(gradient_norm([parameter]))
    assert norm == pytest.approx(expected, rel=FP32_ROUNDING)


@pytest.fixture
def four_part_training(dataset):
    """A training, and the four micro-batches of its first step."""
    config = oracles.config_of(micro_batch_size=2)
    training = oracles.training_of(config, dataset)
    return training, oracles.micro_batches(dataset, config)


def test_partial_gradient_is_that_of_the_first_part(four_part_training):
    training, batches = four_part_training
    partial = training.step.run(batches, lr=0.0, measure_partial=True).partial
    tokens = sum(batch.predicted_tokens for batch in batches)
    assert partial.share == pytest.approx(batches[0].predicted_tokens / tokens)
    _, gradients = oracles.gradients_of(training, batches[:1])
    norm = math.sqrt(float(partial.squared_norm))
    assert norm == pytest.approx(oracles.norm_of(gradients), rel=5 * FP32_ROUNDING)


def test_partial_gradient_is_not_measured_unasked(four_part_training):
    training, batches = four_part_training
    assert training.step.run(batches, lr=0.0).partial is None


def test_single_micro_batch_has_no_partial_gradient(four_part_training):
    training, batches = four_part_training
    result = training.step.run(batches[:1], lr=0.0, measure_partial=True)
    assert result.partial is None


@pytest.fixture
def started_training(dataset):
    """A training that has taken a step, and the two micro-batches of the next one."""
    config = oracles.config_of(micro_batch_size=4)
    training = oracles.training_of(config, dataset)
    batches = oracles.micro_batches(dataset, config, steps=2)
    training.step.run(batches[:2], LEARNING_RATE)
    return training, batches[2:]


def _make_loss_nan(training):
    """Make the loss of the second micro-batch NaN."""
    factors = iter([1.0, math.nan])
    return training.module.register_forward_hook(
        lambda module, inputs, loss: loss * next(factors)
    )


def _make_gradient_infinite(training):
    """Make the first row of one weight's gradient infinite."""
    weight = training.module.layers[0].get_parameter("output.dense.weight")
    return weight.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf)
    )


@pytest.mark.parametrize(
    ("break_step", "loss_is_finite"),
    [
        pytest.param(_make_loss_nan, False, id="loss is NaN"),
        pytest.param(_make_gradient_infinite, True, id="gradient is infinite"),
    ],
)
def test_step_that_is_not_finite_is_skipped(
    started_training, break_step, loss_is_finite
):
    training, batches = started_training
    before = oracles.state_of_training(training)
    handle = break_step(training)
    result = training.step.run(batches, LEARNING_RATE)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == loss_is_finite
    assert not math.isfinite(float(result.grad_norm))
    assert oracles.same(before, oracles.state_of_training(training))
    assert all(parameter.grad is None for parameter in training.module.parameters())


@pytest.mark.parametrize("break_step", [_make_loss_nan, _make_gradient_infinite])
def test_step_after_a_skipped_one_is_taken(started_training, break_step):
    training, batches = started_training
    before = oracles.state_of_training(training)
    handle = break_step(training)
    training.step.run(batches, LEARNING_RATE)
    handle.remove()
    assert training.step.run(batches, LEARNING_RATE, limits=NO_LIMITS).applied
    assert not oracles.same(before, oracles.state_of_training(training))


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_step_above_a_limit_is_skipped(started_training, metric):
    training, batches = started_training
    before = oracles.state_of_training(training)

    def run_with_limit(limit):
        limits = Limits(**{metric: limit})
        return training.step.run(batches, LEARNING_RATE, limits=limits)

    result = run_with_limit(0.0)
    assert not result.applied
    value = float(getattr(result, metric))
    # The loss is in fp64, the norm in fp32.
    below = math.nextafter(value, 0) if metric == "loss" else value * (1 - 1e-6)
    assert not run_with_limit(below).applied
    assert oracles.same(before, oracles.state_of_training(training))
    # Skipped steps change nothing, so the value is the same again.
    assert run_with_limit(value).applied


def test_every_micro_batch_reports_progress(started_training):
    training, batches = started_training
    calls = []
    training.step.progressed = lambda: calls.append(True)
    training.step.run(batches, LEARNING_RATE)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="none"),
        # Not a number of fp32, which would round it.
        pytest.param([1.0, 0.0, 1 + 2**-40], id="three"),
    ],
)
def test_values_are_summed_in_double_precision(started_training, values):
    training, batches = started_training
    sums = training.step.run(batches, LEARNING_RATE, values=values).sums
    assert sums.tolist() == values
    assert sums.dtype == torch.float64


@pytest.fixture(params=["bert", "modernbert"])
def rehearsed_and_plain(request, dataset):
    """A training after a rehearsal, the same one without, and two steps' batches."""
    config = oracles.config_of(request.param)
    rehearsed = oracles.training_of(config, dataset)
    plain = oracles.training_of(config, dataset)
    batches = oracles.micro_batches(dataset, config, steps=2)
    rehearsed.step.rehearse(batches[1])
    return rehearsed, plain, batches


def test_rehearsal_leaves_nothing_behind(rehearsed_and_plain):
    rehearsed, plain, _ = rehearsed_and_plain
    parameters = list(rehearsed.module.parameters())
    assert all(map(torch.equal, parameters, plain.module.parameters()))
    assert all(parameter.grad is None for parameter in parameters)
    assert not rehearsed.optimizer.state


def test_steps_after_a_rehearsal_are_the_same(rehearsed_and_plain):
    rehearsed, plain, batches = rehearsed_and_plain
    for batch in batches:
        result = rehearsed.step.run([batch], LEARNING_RATE)
        assert torch.equal(result.loss, plain.step.run([batch], LEARNING_RATE).loss)
    assert oracles.same(
        oracles.state_of_training(plain), oracles.state_of_training(rehearsed)
    )
