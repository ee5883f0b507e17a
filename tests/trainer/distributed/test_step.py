"""Optimizer steps: accumulation, clipping, skipped steps and the rehearsal."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.trainer.gradients import (
    FP32_ROUNDING,
    assert_gradients_agree,
    loss_and_gradients,
    loss_and_gradients_of_first_step,
    norm_of,
)
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from tests.trainer.training_states import state_of_training, tensors_are_equal
from trainer.build import Training
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.step import gradient_norm
from trainer.health.monitor import NO_LIMITS, Limits

LEARNING_RATE = 1e-3
"""Any rate that changes the weights."""


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
    whole = config_of(layout=layout, micro_batch_size=8)
    accumulated = config_of(layout=layout, micro_batch_size=micro_batch_size)
    assert_gradients_agree(
        loss_and_gradients_of_first_step(accumulated, dataset),
        loss_and_gradients_of_first_step(whole, dataset),
    )


@pytest.fixture
def unclipped_norm(dataset) -> float:
    """Gradient norm of the first step."""
    _, gradients = loss_and_gradients_of_first_step(config_of(), dataset)
    return norm_of(gradients)


def test_gradient_is_clipped_to_its_largest_norm(dataset, unclipped_norm):
    largest_norm = unclipped_norm / 4
    config = config_of(max_grad_norm=largest_norm)
    _, clipped = loss_and_gradients_of_first_step(config, dataset)
    # Clipping adds 1e-6 to the norm, as torch's does: less than 1e-5 of any norm above
    # 0.1.
    assert unclipped_norm > 0.1
    assert norm_of(clipped) == pytest.approx(largest_norm, rel=1e-5)


def test_norm_before_clipping_is_reported(dataset, unclipped_norm):
    config = config_of(max_grad_norm=unclipped_norm / 4)
    training = training_of(config, dataset)
    result = training.step.run(micro_batches(dataset, config), lr=0.0)
    assert float(result.grad_norm) == pytest.approx(unclipped_norm, rel=FP32_ROUNDING)


def test_norm_of_a_large_gradient_is_exact():
    # Five million numbers, of which torch's own norm on a CPU is off by 1e-4.
    parameter = nn.Parameter(torch.zeros(20_000, 256))
    generator = torch.Generator().manual_seed(0)
    parameter.grad = torch.randn(20_000, 256, generator=generator)
    expected = float(parameter.grad.double().norm())
    norm = float(gradient_norm([parameter]))
    assert norm == pytest.approx(expected, rel=FP32_ROUNDING)


@dataclass(frozen=True, kw_only=True)
class BeforeStep:
    """A training, and the micro-batches of its next step."""

    training: Training
    batches: list[MicroBatch]


@pytest.fixture
def before_four_parts(dataset) -> BeforeStep:
    """A training before its first step, of four micro-batches."""
    config = config_of(micro_batch_size=2)
    return BeforeStep(
        training=training_of(config, dataset),
        batches=micro_batches(dataset, config),
    )


def test_partial_gradient_is_that_of_the_first_part(before_four_parts):
    step = before_four_parts.training.step
    batches = before_four_parts.batches
    partial = step.run(batches, lr=0.0, measure_partial=True).partial
    tokens = sum(batch.predicted_tokens for batch in batches)
    assert partial.share == pytest.approx(batches[0].predicted_tokens / tokens)
    _, gradients = loss_and_gradients(before_four_parts.training, batches[:1])
    norm = math.sqrt(float(partial.squared_norm))
    # Gradients of the part are computed as its share of the whole step's, and only
    # their norm is divided by the share, so that more roundings differ.
    assert norm == pytest.approx(norm_of(gradients), rel=5 * FP32_ROUNDING)


def test_partial_gradient_is_not_measured_unasked(before_four_parts):
    step = before_four_parts.training.step
    assert step.run(before_four_parts.batches, lr=0.0).partial is None


def test_single_micro_batch_has_no_partial_gradient(before_four_parts):
    step = before_four_parts.training.step
    result = step.run(before_four_parts.batches[:1], lr=0.0, measure_partial=True)
    assert result.partial is None


@pytest.fixture
def before_second_step(dataset) -> BeforeStep:
    """A training before its second step, of two micro-batches."""
    config = config_of(micro_batch_size=4)
    training = training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=2)
    training.step.run(batches[:2], LEARNING_RATE)
    return BeforeStep(training=training, batches=batches[2:])


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
    before_second_step, break_step, loss_is_finite
):
    training = before_second_step.training
    batches = before_second_step.batches
    before = state_of_training(training)
    handle = break_step(training)
    result = training.step.run(batches, LEARNING_RATE)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == loss_is_finite
    assert not math.isfinite(float(result.grad_norm))
    assert tensors_are_equal(before, state_of_training(training))
    assert all(parameter.grad is None for parameter in training.module.parameters())


@pytest.mark.parametrize(
    "break_step",
    [
        pytest.param(_make_loss_nan, id="loss is NaN"),
        pytest.param(_make_gradient_infinite, id="gradient is infinite"),
    ],
)
def test_step_after_a_skipped_one_is_taken(before_second_step, break_step):
    training = before_second_step.training
    batches = before_second_step.batches
    before = state_of_training(training)
    handle = break_step(training)
    training.step.run(batches, LEARNING_RATE)
    handle.remove()
    assert training.step.run(batches, LEARNING_RATE, limits=NO_LIMITS).applied
    assert not tensors_are_equal(before, state_of_training(training))


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_step_above_a_limit_is_skipped(before_second_step, metric):
    training = before_second_step.training
    batches = before_second_step.batches
    before = state_of_training(training)

    def run_with_limit(limit):
        limits = Limits(**{metric: limit})
        return training.step.run(batches, LEARNING_RATE, limits=limits)

    result = run_with_limit(0.0)
    assert not result.applied
    value = float(getattr(result, metric))
    # Just below the value: the loss is in fp64, the norm in fp32.
    below = math.nextafter(value, 0)
    if metric == "grad_norm":
        below = value * (1 - FP32_ROUNDING)
    assert not run_with_limit(below).applied
    assert tensors_are_equal(before, state_of_training(training))
    # Skipped steps change nothing, so the value is the same again.
    assert run_with_limit(value).applied


def test_every_micro_batch_reports_progress(before_second_step):
    training = before_second_step.training
    batches = before_second_step.batches
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
def test_values_are_summed_in_double_precision(before_second_step, values):
    training = before_second_step.training
    batches = before_second_step.batches
    sums = training.step.run(batches, LEARNING_RATE, values=values).sums
    assert sums.tolist() == values
    assert sums.dtype == torch.float64


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A training after a rehearsal, and the same one without."""

    rehearsed: Training
    plain: Training
    batches: list[MicroBatch]
    """Micro-batches of the first two steps, one for each."""


@pytest.fixture(params=["bert", "modernbert"])
def rehearsal(request, dataset) -> Rehearsal:
    config = config_of(request.param)
    batches = micro_batches(dataset, config, steps=2)
    rehearsed = training_of(config, dataset)
    rehearsed.step.rehearse(batches[1])
    return Rehearsal(
        rehearsed=rehearsed,
        plain=training_of(config, dataset),
        batches=batches,
    )


def test_rehearsal_leaves_nothing_behind(rehearsal):
    parameters = dict(rehearsal.rehearsed.module.named_parameters())
    plain_parameters = dict(rehearsal.plain.module.named_parameters())
    assert tensors_are_equal(parameters, plain_parameters)
    assert all(parameter.grad is None for parameter in parameters.values())
    assert not rehearsal.rehearsed.optimizer.state


def test_steps_after_a_rehearsal_are_the_same(rehearsal):
    for batch in rehearsal.batches:
        result = rehearsal.rehearsed.step.run([batch], LEARNING_RATE)
        plain_result = rehearsal.plain.step.run([batch], LEARNING_RATE)
        assert torch.equal(result.loss, plain_result.loss)
    assert tensors_are_equal(
        state_of_training(rehearsal.plain),
        state_of_training(rehearsal.rehearsed),
    )
