import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import Trainer

from tests.trainer import oracles
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import micro_batch_plans
from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.step import gradient_norm
from trainer.health.monitor import NO_LIMITS, Limits

CONFIG = oracles.config_of(micro_batch_size=4)


@pytest.mark.parametrize("accumulation_steps", [2, 3, 8])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(
    dataset, accumulation_steps, layout
):
    whole = oracles.config_of(layout=layout)
    accumulated = oracles.config_of(
        layout=layout, micro_batch_size=-(-8 // accumulation_steps)
    )
    oracles.check_alike(
        oracles.learned(accumulated, dataset), oracles.learned(whole, dataset)
    )


def test_gradient_is_clipped_to_its_largest_norm(dataset):
    _, gradients = oracles.learned(oracles.config_of(), dataset)
    norm = oracles.norm_of(gradients)
    config = oracles.config_of(max_grad_norm=norm / 4)
    _, clipped = oracles.learned(config, dataset)
    assert oracles.norm_of(clipped) == pytest.approx(norm / 4, rel=1e-5)


def test_norm_before_clipping_is_reported(dataset):
    _, gradients = oracles.learned(oracles.config_of(), dataset)
    norm = oracles.norm_of(gradients)
    config = oracles.config_of(max_grad_norm=norm / 4)
    training = oracles.training_of(config, dataset)
    result = training.step.run(oracles.micro_batches(dataset, config), 0.0)
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_norm_of_a_large_gradient_is_exact():
    parameter = nn.Parameter(torch.zeros(20_000, 256))
    generator = torch.Generator().manual_seed(0)
    parameter.grad = torch.randn(20_000, 256, generator=generator)
    expected = float(parameter.grad.double().norm())
    assert float(gradient_norm([parameter])) == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def two_part_training(dataset):
    """A training and the micro-batches of its first step."""
    config = oracles.config_of(micro_batch_size=2)
    training = oracles.training_of(config, dataset)
    return training, oracles.micro_batches(dataset, config)


def test_partial_gradient_is_that_of_the_first_part(two_part_training):
    training, batches = two_part_training
    partial = training.step.run(batches, 0.0, measure_partial=True).partial
    tokens = sum(batch.predicted_tokens for batch in batches)
    assert partial.share == pytest.approx(batches[0].predicted_tokens / tokens)
    _, gradients = oracles.gradients_of(training, batches[:1])
    expected = oracles.norm_of(gradients) ** 2
    assert float(partial.square) == pytest.approx(expected, rel=1e-5)


def test_partial_gradient_needs_a_request_and_parts(two_part_training):
    training, batches = two_part_training
    assert training.step.run(batches, 0.0).partial is None
    assert training.step.run(batches[:1], 0.0, measure_partial=True).partial is None


@pytest.fixture
def started_training(dataset):
    """A training that has taken a step, and the micro-batches of the next one."""
    training = oracles.training_of(CONFIG, dataset)
    batches = oracles.micro_batches(dataset, CONFIG, steps=2)
    training.step.run(batches[:2], 1e-3)
    return training, batches[2:]


def _make_loss_nan(training):
    """Make the loss of the second micro-batch NaN."""
    factors = iter([1.0, math.nan])
    return training.module.register_forward_hook(
        lambda module, inputs, loss: loss * next(factors)
    )


def _make_gradient_infinite(training):
    """Make a part of the gradient of one weight infinite."""
    weight = list(training.module.parameters())[3]
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
    result = training.step.run(batches, 1e-3)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == loss_is_finite
    assert not math.isfinite(float(result.grad_norm))
    assert oracles.same(before, oracles.state_of_training(training))
    assert all(parameter.grad is None for parameter in training.module.parameters())
    # The next step is taken.
    assert training.step.run(batches, 1e-3, limits=NO_LIMITS).applied
    assert not oracles.same(before, oracles.state_of_training(training))


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_step_above_a_limit_is_skipped(started_training, metric):
    training, batches = started_training
    before = oracles.state_of_training(training)

    def run_with_limit(limit):
        limits = Limits(**{metric: limit})
        return training.step.run(batches, 1e-3, limits=limits)

    result = run_with_limit(0.0)
    assert not result.applied
    value = float(getattr(result, metric))
    # The norm is in fp32.
    below = math.nextafter(value, 0) if metric == "loss" else value * (1 - 1e-6)
    assert not run_with_limit(below).applied
    assert oracles.same(before, oracles.state_of_training(training))
    assert run_with_limit(value).applied


def test_every_micro_batch_reports_progress(started_training):
    training, batches = started_training
    calls = []
    training.step.progressed = lambda: calls.append(True)
    training.step.run(batches, 1e-3)
    assert len(calls) == 2


def test_values_are_summed_in_double_precision(started_training):
    training, batches = started_training
    assert training.step.run(batches, 1e-3).sums.tolist() == []
    sums = training.step.run(batches, 1e-3, values=[1.0, 0.0, 15.0]).sums
    assert (sums.tolist(), sums.dtype) == ([1.0, 0.0, 15.0], torch.float64)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_rehearsal_changes_nothing(dataset, family):
    config = oracles.config_of(family)
    rehearsed = oracles.training_of(config, dataset)
    plain = oracles.training_of(config, dataset)
    batches = oracles.micro_batches(dataset, config, steps=2)
    rehearsed.step.rehearse(batches[1])
    parameters = list(rehearsed.module.parameters())
    assert all(map(torch.equal, parameters, plain.module.parameters()))
    assert all(parameter.grad is None for parameter in parameters)
    assert not rehearsed.optimizer.state
    for batch in batches:
        result = rehearsed.step.run([batch], 1e-3)
        assert torch.equal(result.loss, plain.step.run([batch], 1e-3).loss)
    assert oracles.same(
        oracles.state_of_training(plain), oracles.state_of_training(rehearsed)
    )


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup_steps=st.integers(0, 50),
    max_steps=st.integers(1, 200),
    final_share=st.floats(0, 1),
    decay_share=st.floats(0.01, 1),
)
def test_learning_rate_rises_then_falls(
    schedule, warmup_steps, max_steps, final_share, decay_share
):
    config = oracles.config_of(
        schedule=schedule,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        learning_rate=1.0,
        final_learning_rate_share=final_share,
        decay_share=decay_share,
    )
    rates = [learning_rate(config, step) for step in range(max_steps)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    rising = rates[:warmup_steps]
    falling = rates[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if warmup_steps < max_steps:
        assert max(rates) == pytest.approx(1.0)
        if schedule != "constant":
            assert learning_rate(config, max_steps) == pytest.approx(final_share)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        pytest.param("constant", 99, 1, id="constant"),
        pytest.param("linear", 25, 0.75, id="linear"),
        pytest.param("cosine", 50, 0.5, id="cosine, halfway"),
        # (1 + cos(π / 4)) / 2
        pytest.param("cosine", 25, 0.8536, id="cosine, a quarter"),
        # The decay begins at step 80 of 100.
        pytest.param("wsd", 79, 1, id="wsd, stable"),
        # 1 - sqrt(5 / 20)
        pytest.param("wsd", 85, 0.5, id="wsd, decaying"),
    ],
)
def test_each_schedule_has_its_shape(schedule, step, rate):
    config = oracles.config_of(
        schedule=schedule,
        warmup_steps=0,
        max_steps=100,
        learning_rate=1.0,
        decay_share=0.2,
    )
    assert learning_rate(config, step) == pytest.approx(rate, abs=1e-4)


def parameter_names(module):
    """Return the name of every parameter, by its identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_weight_decay_is_that_of_transformers(family, dataset):
    config = oracles.config_of(family)
    training = oracles.training_of(config, dataset)
    model = training.module.model
    names = parameter_names(model)
    decayed_group, other_group = training.optimizer.param_groups
    decayed = {names[id(parameter)] for parameter in decayed_group["params"]}
    others = {names[id(parameter)] for parameter in other_group["params"]}
    expected = set(Trainer.get_decay_parameter_names(None, model))
    assert decayed == expected & set(names.values())
    assert decayed | others == set(names.values())
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert {names[id(norm.weight)] for norm in norms} <= others
    assert decayed_group["weight_decay"] == config.weight_decay
    assert other_group["weight_decay"] == 0.0


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_optimizer_is_fused_with_configured_settings(family, dataset):
    config = oracles.config_of(family, adam_beta2=0.98, adam_epsilon=1e-6)
    groups = oracles.training_of(config, dataset).optimizer.param_groups
    assert len(groups) == 2
    for group in groups:
        assert group["fused"]
        assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-6)


def _losses_by_token(
    dataset: TokenDataset, family: str, layout: str
) -> dict[tuple[int, int], float]:
    """Return the loss of every predicted token of the first epoch.

    The key is the token's sample and its position in the sample, which no layout
    changes, so that layouts can be compared token by token.
    """
    config = oracles.config_of(
        family, layout=layout, micro_batch_size=50, global_batch_size=50, max_epochs=1
    )
    module = oracles.training_of(config, dataset).module
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    losses_by_token: dict[tuple[int, int], float] = {}
    for micro_batch_plan in micro_batch_plans(dataset, config, plan, 0, steps=10):
        batch = source.__getitems__(micro_batch_plan)
        with torch.no_grad():
            logits_KV, labels_K = module._predict(batch)
        losses_K = functional.cross_entropy(logits_KV, labels_K, reduction="none")
        losses = losses_K[: batch.predicted_tokens].tolist()
        number_P = torch.searchsorted(batch.starts_N, batch.predicted_P, right=True) - 1
        positions = (batch.predicted_P - batch.starts_N[number_P]).tolist()
        samples = micro_batch_plan.segments.samples[number_P.numpy()].tolist()
        tokens = zip(samples, positions, strict=True)
        losses_by_token.update(zip(tokens, losses, strict=True))
    return losses_by_token


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_every_layout_gives_each_token_the_same_loss(family, dataset):
    padded = _losses_by_token(dataset, family, "padded")
    assert len({sample for sample, _ in padded}) > 350
    for layout in ("packed", "bucketed"):
        losses = _losses_by_token(dataset, family, layout)
        assert losses.keys() == padded.keys()
        for token, loss in losses.items():
            assert abs(loss - padded[token]) <= 1e-5


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sparse_head_has_the_gradient_of_a_dense_one(family, layout, dataset):
    dense_config = oracles.config_of(
        family, layout=layout, mlm_head="dense", last_layer="dense"
    )
    dense = oracles.learned(dense_config, dataset)
    for last_layer in ("dense", "sparse"):
        config = oracles.config_of(
            family, layout=layout, mlm_head="sparse", last_layer=last_layer
        )
        training = oracles.training_of(config, dataset)
        assert training.module.has_sparse_last_layer == (last_layer == "sparse")
        batches = oracles.micro_batches(dataset, config)
        oracles.check_alike(oracles.gradients_of(training, batches), dense)


@pytest.mark.parametrize(
    ("slots", "sequence_slots", "overflows"), [(192, 64, 0), (16, 4, 1)]
)
def test_head_with_fixed_slots_drops_no_token(
    slots, sequence_slots, overflows, dataset
):
    config = oracles.config_of()
    training = oracles.training_of(config, dataset)
    training.module._fixed_slots = slots
    training.module._fixed_sequence_slots = sequence_slots
    batches = oracles.micro_batches(dataset, config)
    assert 16 < batches[0].predicted_tokens <= 192
    oracles.check_alike(
        oracles.gradients_of(training, batches), oracles.learned(config, dataset)
    )
    assert training.module.overflows == overflows


def test_micro_batch_without_predicted_tokens_has_no_gradient(dataset):
    config = oracles.config_of(masking_probability=1e-6)
    (batch,) = oracles.micro_batches(dataset, config)
    assert batch.predicted_tokens == 0
    loss, gradients = oracles.learned(config, dataset)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_loss_and_accuracy_are_those_of_transformers(family, dataset):
    config = oracles.config_of(family, layout="padded")
    training = oracles.training_of(config, dataset)
    (batch,) = oracles.micro_batches(dataset, config)
    labels_BS = batch.labels_BS()
    with torch.no_grad():
        expected = training.module.model(
            input_ids=batch.wide_ids_BS(),
            attention_mask=batch.attention_BS(),
            labels=labels_BS,
        )
        loss_sum, hits = training.module.evaluate(batch)
    is_hit_BS = expected.logits.argmax(-1) == labels_BS
    assert int(hits) == int(is_hit_BS[labels_BS != IGNORED_LABEL].sum())
    expected_loss = pytest.approx(float(expected.loss), rel=1e-5)
    assert float(loss_sum / batch.predicted_tokens) == expected_loss
    assert float(training.step.run([batch], 1e-3).loss) == expected_loss
