import math

import pytest
import torch

from tests.trainer.oracles import config_of, gradients_of, micro_batches, relative_distance, training_of
from trainer.dataset import TokenDataset
from trainer.health import NO_LIMITS, Limits
from trainer.parallel import join_ranks
from trainer.snapshot import held_tensors


def _gradients(patterned_dataset, accumulation: int, **changes) -> tuple[float, dict[str, torch.Tensor]]:
    config = config_of(micro_batch_rows=-(-8 // accumulation), **changes)
    dataset = TokenDataset.open(patterned_dataset)
    return gradients_of(training_of(config, dataset), micro_batches(dataset, config))


@pytest.mark.parametrize("accumulation", [2, 3, 8])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(patterned_dataset, accumulation, layout):
    whole_loss, whole = _gradients(patterned_dataset, 1, layout=layout)
    loss, parts = _gradients(patterned_dataset, accumulation, layout=layout)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert relative_distance(whole, parts) <= 1e-6


def test_the_loss_is_the_mean_cross_entropy_of_the_predicted_tokens(patterned_dataset):
    config = config_of(layout="padded")
    dataset = TokenDataset.open(patterned_dataset)
    training = training_of(config, dataset)
    (batch,) = micro_batches(dataset, config)
    with torch.no_grad():
        expected = training.model(
            input_ids=batch.wide_ids_BS(), attention_mask=batch.attention_BS(), labels=batch.labels_BS()
        ).loss
    result = training.step.run([batch], 1e-3)
    assert float(result.loss) == pytest.approx(float(expected), rel=1e-5)


def test_the_gradient_is_cut_to_its_largest_norm_and_the_norm_before_is_reported(patterned_dataset):
    _, loose = _gradients(patterned_dataset, 1)
    norm = sum(float((gradient.double() ** 2).sum()) for gradient in loose.values()) ** 0.5
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(max_grad_norm=norm / 4)
    training = training_of(config, dataset)
    seen = []
    training.optimizer.register_step_pre_hook(
        lambda *_: seen.append([parameter.grad.clone() for parameter in training.module.parameters()])
    )
    result = training.step.run(micro_batches(dataset, config), 0.0)
    cut = sum(float((gradient.double() ** 2).sum()) for gradient in seen[0]) ** 0.5
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert cut == pytest.approx(norm / 4, rel=1e-5)


def test_the_norm_of_a_large_gradient_is_exact_to_rounding():
    from trainer.step import gradient_norm

    parameter = torch.nn.Parameter(torch.zeros(20_000, 256))
    parameter.grad = torch.randn(20_000, 256, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    assert float(gradient_norm([parameter])) == pytest.approx(exact, rel=1e-6)


def test_part_of_the_gradient_is_measured_where_there_are_parts_and_somebody_asks(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_rows=2)
    training = training_of(config, dataset)
    batches = micro_batches(dataset, config)
    assert training.step.run(batches, 0.0).partial is None
    partial = training.step.run(batches, 0.0, part_of_it=True).partial
    share = batches[0].predicted_tokens / sum(batch.predicted_tokens for batch in batches)
    assert partial.share == pytest.approx(share)
    _, alone = gradients_of(training, batches[:1])
    square = sum(float((gradient.double() ** 2).sum()) for gradient in alone.values())
    assert float(partial.square) == pytest.approx(square, rel=1e-5)
    assert training.step.run(batches[:1], 0.0, part_of_it=True).partial is None


def test_bf16_computes_about_the_same_loss_and_gradient(patterned_dataset):
    for family in ("bert", "modernbert"):
        dataset = TokenDataset.open(patterned_dataset)
        config = config_of(family)
        loss, gradients = gradients_of(training_of(config, dataset), micro_batches(dataset, config))
        half = training_of(config.model_copy(update={"precision": "bf16"}), dataset)
        half_loss, half_gradients = gradients_of(half, micro_batches(dataset, config))
        assert half_loss == pytest.approx(loss, rel=1e-2)
        assert 1e-5 < relative_distance(gradients, half_gradients) < 0.05
        assert all(parameter.dtype == torch.float32 for parameter in half.module.parameters())


@pytest.fixture
def rig(patterned_dataset):
    """A training of two micro-batches a step that has taken a step, and its batches."""
    dataset, config = TokenDataset.open(patterned_dataset), config_of(micro_batch_rows=4)
    training = training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=2)
    training.step.run(batches[:2], 1e-3)
    return training, batches[2:]


def _state(training):
    held = held_tensors(training, join_ranks(config_of(), environment={}))
    return {one.name: one.local.clone() for one in held}


def _unchanged(before, training):
    after = _state(training)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _broken(training, what):
    """Let the second micro-batch's loss, or the gradient of one weight, be no number."""
    calls = []
    if what == "loss":
        handle = training.module.register_forward_hook(
            lambda module, inputs, output: output * math.nan if calls.append(1) or len(calls) == 2 else output
        )
    else:
        weight = list(training.module.parameters())[3]
        handle = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf))
    return handle


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_whose_numbers_are_not_finite_changes_neither_weights_nor_the_optimizer(rig, what):
    training, batches = rig
    before = _state(training)
    handle = _broken(training, what)
    result = training.step.run(batches, 1e-3)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == (what == "gradient")
    assert not math.isfinite(float(result.grad_norm))
    assert _unchanged(before, training)
    assert all(parameter.grad is None for parameter in training.module.parameters())
    again = training.step.run(batches, 1e-3)
    assert again.applied
    assert not _unchanged(before, training)


@pytest.mark.parametrize("which", ["loss", "grad_norm"])
def test_a_step_above_a_limit_is_left_out_and_one_at_the_limit_is_taken(rig, which):
    training, batches = rig
    before = _state(training)
    result = training.step.run(batches, 1e-3, limits=Limits(**{"loss": 0.0, "grad_norm": 0.0} | {which: math.inf}))
    assert not result.applied
    assert _unchanged(before, training)
    numbers = {"loss": float(result.loss), "grad_norm": float(result.grad_norm)}
    below = {which: math.nextafter(numbers[which], 0) if which == "loss" else numbers[which] * (1 - 1e-6)}
    limits = {"loss": math.inf, "grad_norm": math.inf}
    assert not training.step.run(batches, 1e-3, limits=Limits(**limits | below)).applied
    assert _unchanged(before, training)
    assert training.step.run(batches, 1e-3, limits=Limits(**limits | {which: numbers[which]})).applied


def test_a_step_after_one_that_was_left_out_is_the_one_that_would_have_been_taken_instead(rig, patterned_dataset):
    training, batches = rig
    config = config_of(micro_batch_rows=4)
    plain = training_of(config, TokenDataset.open(patterned_dataset))
    plain.step.run(micro_batches(TokenDataset.open(patterned_dataset), config), 1e-3)
    training.step.run(batches, 0.7, limits=Limits(loss=0.0, grad_norm=0.0))
    training.step.run(batches, 1e-3)
    plain.step.run(batches, 1e-3)
    assert _unchanged(_state(plain), training)


def test_a_step_without_limits_has_none_that_are_reached(rig):
    training, batches = rig
    assert training.step.run(batches, 1e-3, limits=NO_LIMITS).applied


def test_what_ranks_tell_comes_back_added_up(rig):
    training, batches = rig
    assert training.step.run(batches, 1e-3).told.tolist() == []
    result = training.step.run(batches, 1e-3, told=[1.0, 0.0, 15.0])
    assert result.told.tolist() == [1.0, 0.0, 15.0]
    assert result.told.dtype == torch.float64


def test_each_micro_batch_is_a_sign_of_life(rig):
    training, batches = rig
    seen = []
    training.step.progressed = lambda: seen.append(1)
    training.step.run(batches, 1e-3)
    assert len(seen) == 2


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_rehearsal_leaves_no_trace(patterned_dataset, family):
    dataset, config = TokenDataset.open(patterned_dataset), config_of(family)
    training, plain = training_of(config, dataset), training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=2)
    before = {name: value.detach().clone() for name, value in training.module.named_parameters()}
    training.step.rehearse(batches[1])
    assert all(torch.equal(before[name], value) for name, value in training.module.named_parameters())
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert not training.optimizer.state
    for batch in batches:
        first, second = (one.step.run([batch], 1e-3) for one in (training, plain))
        assert torch.equal(first.loss, second.loss)
    assert _unchanged(_state(plain), training)
