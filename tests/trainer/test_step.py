import math

import pytest
import torch

from tests.trainer.oracles import (
    check_alike,
    config_of,
    gradients_of,
    learned,
    micro_batches,
    norm_of,
    relative_distance,
    same,
    state_of_training,
    training_of,
)
from trainer.health import NO_LIMITS, Limits
from trainer.step import gradient_norm

CONFIG = config_of(micro_batch_rows=4)


@pytest.mark.parametrize("accumulation", [2, 3, 8])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(dataset, accumulation, layout):
    parts = learned(config_of(layout=layout, micro_batch_rows=-(-8 // accumulation)), dataset)
    check_alike(parts, learned(config_of(layout=layout), dataset))


def test_the_gradient_is_cut_to_its_largest_norm_and_the_norm_before_is_reported(dataset):
    norm = norm_of(learned(config_of(), dataset)[1])
    config = config_of(max_grad_norm=norm / 4)
    assert norm_of(learned(config, dataset)[1]) == pytest.approx(norm / 4, rel=1e-5)
    result = training_of(config, dataset).step.run(micro_batches(dataset, config), 0.0)
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_the_norm_of_a_large_gradient_is_exact_to_rounding():
    parameter = torch.nn.Parameter(torch.zeros(20_000, 256))
    parameter.grad = torch.randn(20_000, 256, generator=torch.Generator().manual_seed(0))
    assert float(gradient_norm([parameter])) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-6)


def test_part_of_the_gradient_is_measured_where_there_are_parts_and_somebody_asks(dataset):
    config = config_of(micro_batch_rows=2)
    training, batches = training_of(config, dataset), micro_batches(dataset, config)
    assert training.step.run(batches, 0.0).partial is None
    partial = training.step.run(batches, 0.0, part_of_it=True).partial
    assert partial.share == pytest.approx(batches[0].predicted_tokens / sum(one.predicted_tokens for one in batches))
    _, alone = gradients_of(training, batches[:1])
    assert float(partial.square) == pytest.approx(norm_of(alone) ** 2, rel=1e-5)
    assert training.step.run(batches[:1], 0.0, part_of_it=True).partial is None


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_bf16_computes_about_the_same_loss_and_gradient(dataset, family):
    whole = learned(config_of(family), dataset)
    config = config_of(family, precision="bf16")
    training = training_of(config, dataset)
    half = gradients_of(training, micro_batches(dataset, config))
    check_alike(half, whole, loss=1e-2, gradient=0.05)
    assert relative_distance(whole[1], half[1]) > 1e-5
    assert all(parameter.dtype == torch.float32 for parameter in training.module.parameters())


@pytest.fixture
def rig(dataset):
    """A training of two micro-batches a step that has taken a step, and the batches of the next."""
    training = training_of(CONFIG, dataset)
    batches = micro_batches(dataset, CONFIG, steps=2)
    training.step.run(batches[:2], 1e-3)
    return training, batches[2:]


def _broken(training, what):
    """Let the second micro-batch's loss, or the gradient of one weight, be no number."""
    if what == "loss":
        factors = iter([1.0, math.nan])
        return training.module.register_forward_hook(lambda module, inputs, loss: loss * next(factors))
    weight = list(training.module.parameters())[3]
    return weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_whose_numbers_are_not_finite_changes_neither_weights_nor_the_optimizer(rig, what):
    training, batches = rig
    before = state_of_training(training)
    handle = _broken(training, what)
    result = training.step.run(batches, 1e-3)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == (what == "gradient")
    assert not math.isfinite(float(result.grad_norm))
    assert same(before, state_of_training(training))
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert training.step.run(batches, 1e-3, limits=NO_LIMITS).applied
    assert not same(before, state_of_training(training))


@pytest.mark.parametrize("which", ["loss", "grad_norm"])
def test_a_step_above_a_limit_is_left_out_and_one_at_the_limit_is_taken(rig, which):
    training, batches = rig
    before = state_of_training(training)

    def taken(limit):
        limits = Limits(**{"loss": math.inf, "grad_norm": math.inf} | {which: limit})
        return training.step.run(batches, 1e-3, limits=limits)

    result = taken(0.0)
    number = float(getattr(result, which))
    below = math.nextafter(number, 0) if which == "loss" else number * (1 - 1e-6)
    assert not result.applied
    assert not taken(below).applied
    assert same(before, state_of_training(training))
    assert taken(number).applied


def test_a_step_after_one_that_was_left_out_is_the_one_that_would_have_been_taken_instead(rig, dataset):
    training, batches = rig
    plain = training_of(CONFIG, dataset)
    plain.step.run(micro_batches(dataset, CONFIG), 1e-3)
    training.step.run(batches, 0.7, limits=Limits(loss=0.0, grad_norm=0.0))
    for one in (training, plain):
        one.step.run(batches, 1e-3)
    assert same(state_of_training(plain), state_of_training(training))


def test_each_micro_batch_is_a_sign_of_life_and_what_ranks_tell_comes_back_added_up(rig):
    training, batches = rig
    seen = []
    training.step.progressed = lambda: seen.append(1)
    assert training.step.run(batches, 1e-3).told.tolist() == []
    assert len(seen) == 2
    told = training.step.run(batches, 1e-3, told=[1.0, 0.0, 15.0]).told
    assert (told.tolist(), told.dtype) == ([1.0, 0.0, 15.0], torch.float64)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_rehearsal_leaves_no_trace(dataset, family):
    config = config_of(family)
    training, plain = training_of(config, dataset), training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=2)
    training.step.rehearse(batches[1])
    assert all(map(torch.equal, training.module.parameters(), plain.module.parameters()))
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert not training.optimizer.state
    for batch in batches:
        first, second = (one.step.run([batch], 1e-3) for one in (training, plain))
        assert torch.equal(first.loss, second.loss)
    assert same(state_of_training(plain), state_of_training(training))
