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
from trainer.data.loader import MicroBatchSource, micro_batch_plans
from trainer.data.masking import IGNORED_LABEL, head_slots
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.step import gradient_norm
from trainer.health.monitor import NO_LIMITS, Limits

CONFIG = oracles.config_of(micro_batch_size=4)


@pytest.mark.parametrize("accumulation", [2, 3, 8])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(
    dataset, accumulation, layout
):
    parts = oracles.learned(
        oracles.config_of(layout=layout, micro_batch_size=-(-8 // accumulation)),
        dataset,
    )
    oracles.check_alike(
        parts, oracles.learned(oracles.config_of(layout=layout), dataset)
    )


def test_the_gradient_is_cut_to_its_largest_norm_and_the_norm_before_is_reported(
    dataset,
):
    norm = oracles.norm_of(oracles.learned(oracles.config_of(), dataset)[1])
    config = oracles.config_of(max_grad_norm=norm / 4)
    assert oracles.norm_of(oracles.learned(config, dataset)[1]) == pytest.approx(
        norm / 4, rel=1e-5
    )
    result = oracles.training_of(config, dataset).step.run(
        oracles.micro_batches(dataset, config), 0.0
    )
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_the_norm_of_a_large_gradient_is_exact_to_rounding():
    parameter = torch.nn.Parameter(torch.zeros(20_000, 256))
    parameter.grad = torch.randn(
        20_000, 256, generator=torch.Generator().manual_seed(0)
    )
    assert float(gradient_norm([parameter])) == pytest.approx(
        float(parameter.grad.double().norm()), rel=1e-6
    )


def test_part_of_the_gradient_is_measured_where_there_are_parts_and_somebody_asks(
    dataset,
):
    config = oracles.config_of(micro_batch_size=2)
    training, batches = (
        oracles.training_of(config, dataset),
        oracles.micro_batches(dataset, config),
    )
    assert training.step.run(batches, 0.0).partial is None
    partial = training.step.run(batches, 0.0, measure_partial=True).partial
    assert partial.share == pytest.approx(
        batches[0].predicted_tokens / sum(one.predicted_tokens for one in batches)
    )
    _, alone = oracles.gradients_of(training, batches[:1])
    assert float(partial.square) == pytest.approx(oracles.norm_of(alone) ** 2, rel=1e-5)
    assert training.step.run(batches[:1], 0.0, measure_partial=True).partial is None


@pytest.fixture
def rig(dataset):
    """A training of two micro-batches a step that has taken a step, and the batches of
    the next."""
    training = oracles.training_of(CONFIG, dataset)
    batches = oracles.micro_batches(dataset, CONFIG, steps=2)
    training.step.run(batches[:2], 1e-3)
    return training, batches[2:]


def _broken(training, what):
    """Let the second micro-batch's loss, or the gradient of one weight, be no
    number."""
    if what == "loss":
        factors = iter([1.0, math.nan])
        return training.module.register_forward_hook(
            lambda module, inputs, loss: loss * next(factors)
        )
    weight = list(training.module.parameters())[3]
    return weight.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf)
    )


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_whose_numbers_are_not_finite_changes_neither_weights_nor_the_optimizer(
    rig, what
):
    training, batches = rig
    before = oracles.state_of_training(training)
    handle = _broken(training, what)
    result = training.step.run(batches, 1e-3)
    handle.remove()
    assert not result.applied
    assert math.isfinite(float(result.loss)) == (what == "gradient")
    assert not math.isfinite(float(result.grad_norm))
    assert oracles.same(before, oracles.state_of_training(training))
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert training.step.run(batches, 1e-3, limits=NO_LIMITS).applied
    assert not oracles.same(before, oracles.state_of_training(training))


@pytest.mark.parametrize("which", ["loss", "grad_norm"])
def test_a_step_above_a_limit_is_left_out_and_one_at_the_limit_is_taken(rig, which):
    training, batches = rig
    before = oracles.state_of_training(training)

    def taken(limit):
        limits = Limits(**{"loss": math.inf, "grad_norm": math.inf} | {which: limit})
        return training.step.run(batches, 1e-3, limits=limits)

    result = taken(0.0)
    number = float(getattr(result, which))
    below = math.nextafter(number, 0) if which == "loss" else number * (1 - 1e-6)
    assert not result.applied
    assert not taken(below).applied
    assert oracles.same(before, oracles.state_of_training(training))
    assert taken(number).applied


def test_each_micro_batch_is_a_sign_of_life_and_what_ranks_tell_comes_back_added_up(
    rig,
):
    training, batches = rig
    seen = []
    training.step.progressed = lambda: seen.append(1)
    assert training.step.run(batches, 1e-3).sums.tolist() == []
    assert len(seen) == 2
    sums = training.step.run(batches, 1e-3, values=[1.0, 0.0, 15.0]).sums
    assert (sums.tolist(), sums.dtype) == ([1.0, 0.0, 15.0], torch.float64)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_rehearsal_leaves_no_trace(dataset, family):
    config = oracles.config_of(family)
    training, plain = (
        oracles.training_of(config, dataset),
        oracles.training_of(config, dataset),
    )
    batches = oracles.micro_batches(dataset, config, steps=2)
    training.step.rehearse(batches[1])
    assert all(
        map(torch.equal, training.module.parameters(), plain.module.parameters())
    )
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert not training.optimizer.state
    for batch in batches:
        first, second = (one.step.run([batch], 1e-3) for one in (training, plain))
        assert torch.equal(first.loss, second.loss)
    assert oracles.same(
        oracles.state_of_training(plain), oracles.state_of_training(training)
    )


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    final=st.floats(0, 1),
    share=st.floats(0.01, 1),
)
def test_the_learning_rate_rises_to_its_peak_and_falls_without_leaving_bounds(
    schedule, warmup, steps, final, share
):
    config = oracles.config_of(
        schedule=schedule,
        warmup_steps=warmup,
        max_steps=steps,
        learning_rate=1.0,
        final_learning_rate_share=final,
        decay_share=share,
    )
    rates = [learning_rate(config, step) for step in range(steps)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)
    up, down = rates[:warmup], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert warmup >= steps or max(rates) == pytest.approx(1.0)
    if schedule != "constant" and warmup < steps:
        assert learning_rate(config, steps) == pytest.approx(final)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("constant", 99, 1),
        ("linear", 25, 0.75),
        ("cosine", 50, 0.5),
        ("cosine", 25, 0.8536),
        ("wsd", 79, 1),
        ("wsd", 85, 0.5),
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


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_weight_decay_falls_on_what_transformers_lets_decay_by_a_fused_optimizer(
    family, dataset
):
    config = oracles.config_of(family, adam_beta2=0.98, adam_epsilon=1e-6)
    training = oracles.training_of(config, dataset)
    groups = training.optimizer.param_groups
    names = {
        id(parameter): name
        for name, parameter in training.module.model.named_parameters()
    }
    decayed, plain = (
        {names[id(parameter)] for parameter in group["params"]} for group in groups
    )
    assert decayed == set(
        Trainer.get_decay_parameter_names(None, training.module.model)
    ) & set(names.values())
    assert decayed | plain == set(names.values())
    assert [group["weight_decay"] for group in groups] == [config.weight_decay, 0.0]
    norms = [
        module
        for module in training.module.model.modules()
        if isinstance(module, nn.LayerNorm)
    ]
    assert {names[id(norm.weight)] for norm in norms} <= plain
    assert [(group["fused"], group["betas"], group["eps"]) for group in groups] == [
        (True, (0.9, 0.98), 1e-6)
    ] * 2


def _losses_by_token(
    dataset: TokenDataset, family: str, layout: str
) -> dict[tuple[int, int], float]:
    """The loss of every predicted token of the first epoch, by its sample and its place
    there."""
    config = oracles.config_of(
        family, layout=layout, micro_batch_size=50, global_batch_size=50, max_epochs=1
    )
    module = oracles.training_of(config, dataset).module
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    found: dict[tuple[int, int], float] = {}
    for one in micro_batch_plans(dataset, config, plan, 0, steps=10):
        batch = source.__getitems__(one)
        with torch.no_grad():
            logits_KV, labels_K = module._predict(batch)
        losses = functional.cross_entropy(logits_KV, labels_K, reduction="none")[
            : batch.predicted_tokens
        ]
        number = torch.searchsorted(batch.starts_N, batch.predicted_P, right=True) - 1
        places = (batch.predicted_P - batch.starts_N[number]).tolist()
        samples = one.segments.samples[number.numpy()].tolist()
        found |= dict(
            zip(zip(samples, places, strict=True), losses.tolist(), strict=True)
        )
    return found


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_packed_and_bucketed_rows_give_each_token_the_loss_of_padded_rows(
    family, dataset
):
    padded = _losses_by_token(dataset, family, "padded")
    assert len({sample for sample, _ in padded}) > 350
    for layout in ("packed", "bucketed"):
        found = _losses_by_token(dataset, family, layout)
        assert found.keys() == padded.keys()
        assert max(abs(found[token] - padded[token]) for token in padded) <= 1e-5


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_head_on_the_places_to_predict_has_the_loss_and_gradient_of_one_on_all(
    family, layout, dataset
):
    whole = oracles.learned(
        oracles.config_of(family, layout=layout, mlm_head="dense", last_layer="dense"),
        dataset,
    )
    for last_layer in ("dense", "sparse"):
        config = oracles.config_of(
            family, layout=layout, mlm_head="sparse", last_layer=last_layer
        )
        training = oracles.training_of(config, dataset)
        assert training.module.has_sparse_last_layer == (last_layer == "sparse")
        oracles.check_alike(
            oracles.gradients_of(training, oracles.micro_batches(dataset, config)),
            whole,
        )


@pytest.mark.parametrize(
    ("slots", "sequence_slots", "overflows"), [(192, 64, 0), (16, 4, 1)]
)
def test_a_head_of_fixed_slots_drops_nothing_and_counts_micro_batches_that_need_more(
    slots, sequence_slots, overflows, dataset
):
    fixed = oracles.training_of(oracles.config_of(), dataset)
    fixed.module._slots, fixed.module._sequence_slots = slots, sequence_slots
    batches = oracles.micro_batches(dataset, oracles.config_of())
    assert 16 < batches[0].predicted_tokens <= 192
    oracles.check_alike(
        oracles.gradients_of(fixed, batches),
        oracles.learned(oracles.config_of(), dataset),
    )
    assert fixed.module.overflows == overflows


@pytest.mark.parametrize(
    ("places", "probability"), [(64, 0.15), (4096, 0.15), (94_208, 0.3), (64, 0.99)]
)
def test_head_slots_are_whole_tiles_six_sigmas_above_the_mean_and_never_more_than_places(
    places, probability
):
    slots = head_slots(places, probability)
    assert slots % 64 == 0
    mean, sigma = (
        places * probability,
        (places * probability * (1 - probability)) ** 0.5,
    )
    assert (
        min(places, mean + 6 * sigma)
        <= slots
        <= max(64, min(places, mean + 6 * sigma + 64))
    )


def test_a_micro_batch_with_nothing_to_predict_weighs_nothing(dataset):
    config = oracles.config_of(masking_probability=1e-6)
    assert oracles.micro_batches(dataset, config)[0].predicted_tokens == 0
    loss, gradients = oracles.learned(config, dataset)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_hits_and_loss_of_training_and_evaluation_are_those_of_the_library(
    family, dataset
):
    config = oracles.config_of(family, layout="padded")
    training = oracles.training_of(config, dataset)
    (batch,) = oracles.micro_batches(dataset, config)
    labels = batch.labels_BS()
    with torch.no_grad():
        inputs = {
            "input_ids": batch.wide_ids_BS(),
            "attention_mask": batch.attention_BS(),
        }
        expected = training.module.model(**inputs, labels=labels)
        loss, hits = training.module.evaluate(batch)
    assert int(hits) == int(
        (expected.logits.argmax(-1) == labels)[labels != IGNORED_LABEL].sum()
    )
    for one in (loss / batch.predicted_tokens, training.step.run([batch], 1e-3).loss):
        assert float(one) == pytest.approx(float(expected.loss), rel=1e-5)
