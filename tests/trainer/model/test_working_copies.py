"""Working copies: weights that are cast to bf16 once per step.

They are compared with fp32, and with autocast, which casts weights in every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from tests.trainer.gradients import loss_and_gradients, relative_distance
from tests.trainer.tiny_models import FAMILIES, config_of, micro_batches, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.formats.train_config import TrainConfig
from trainer.model import masked_lm

MAIN_FAMILIES = (*FAMILIES, "esm", "eurobert")
# Architecture, activation checkpointing and layout of each case.
SELECTIVE_CASES = [(family, "selective", "padded") for family in MAIN_FAMILIES]
FULL_CASES = [(family, "full", "packed") for family in MAIN_FAMILIES]
OTHER_CASES = [
    ("bert", "none", "packed"),
    ("albert", "none", "packed"),
    ("mpnet", "none", "padded"),
]
CASES = SELECTIVE_CASES + FULL_CASES + OTHER_CASES


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Losses and gradients of one step."""

    losses_K: torch.Tensor
    """Loss of each slot of the head."""
    gradients: dict[str, torch.Tensor]
    """Gradient of each parameter, by its name."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same step in fp32, and in bf16 by autocast and with working copies."""

    take_step: Callable[..., StepOutput]
    """Function that takes the step with changed settings, in bf16 with copies."""
    in_fp32: StepOutput
    with_autocast: StepOutput
    with_copies: StepOutput

    @property
    def autocast_error(self) -> float:
        """Distance of autocast's gradients from those of fp32."""
        return relative_distance(self.in_fp32.gradients, self.with_autocast.gradients)

    @property
    def copies_error(self) -> float:
        """Distance of gradients with working copies from those of fp32."""
        return relative_distance(self.in_fp32.gradients, self.with_copies.gradients)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def comparison(request, patterned_dataset) -> Comparison:
    family, activation_checkpointing, layout = request.param
    dataset = TokenDataset.open(patterned_dataset)

    def take_step(
        *, precision: str = "bf16", copies: bool = True, **changes
    ) -> StepOutput:
        config = config_of(
            family,
            activation_checkpointing=activation_checkpointing,
            layout=layout,
            precision=precision,
            **changes,
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not copies:
                monkeypatch.setattr(
                    masked_lm, "verify_working_copies", lambda _: "for comparison"
                )
            training = training_of(config, dataset)
        has_copies = training.module.working_copies is not None
        assert has_copies == (copies and precision == "bf16")
        batches = micro_batches(dataset, config)
        with torch.no_grad():
            logits_KV, labels_K = training.module._predict(batches[0])
        losses_K = functional.cross_entropy(
            logits_KV.float(), labels_K, reduction="none"
        )
        return StepOutput(
            losses_K=losses_K,
            gradients=loss_and_gradients(training, batches).gradients,
        )

    return Comparison(
        take_step=take_step,
        in_fp32=take_step(precision="fp32"),
        with_autocast=take_step(copies=False),
        with_copies=take_step(),
    )


# Autocast rounds as often as working copies do, so the errors of both are about equal.
# Factors above 1 leave room for chance.


def test_losses_are_as_exact_as_with_autocast(comparison):
    exact_K = comparison.in_fp32.losses_K
    autocast_error = (comparison.with_autocast.losses_K - exact_K).norm()
    error = (comparison.with_copies.losses_K - exact_K).norm()
    assert 0 < error <= 1.5 * autocast_error


def test_gradients_are_as_exact_as_with_autocast(comparison):
    assert 0 < comparison.copies_error <= 1.5 * comparison.autocast_error


def test_gradients_accumulate_over_micro_batches(comparison):
    accumulated = comparison.take_step(micro_batch_size=2).gradients
    distance = relative_distance(comparison.with_copies.gradients, accumulated)
    # Both gradients have an error of their own.
    assert distance < 2 * comparison.autocast_error


@pytest.mark.parametrize("comparison", SELECTIVE_CASES, ids="-".join, indirect=True)
def test_bf16_residual_stream_is_nearly_as_exact(comparison):
    with_bf16_residual = comparison.take_step(residual_dtype="bf16").gradients
    error = relative_distance(comparison.in_fp32.gradients, with_bf16_residual)
    # A setting without effect would give the same error.
    assert error != comparison.copies_error
    # Each layer also rounds the sum of all layers so far.
    assert error < 3 * comparison.autocast_error


def _losses(config: TrainConfig, dataset) -> list[float]:
    training = training_of(config, dataset)
    return [
        float(training.step.run([batch], 3e-3).loss)
        for batch in micro_batches(dataset, config, steps=300)
    ]


@pytest.mark.slow
def test_training_ends_with_loss_of_fp32(dataset):
    in_fp32, in_bf16 = (
        _losses(config_of(max_grad_norm=1.0, precision=dtype), dataset)
        for dtype in ("fp32", "bf16")
    )
    # Sums over 20 steps, as single losses vary with their batch.
    first_in_bf16 = sum(in_bf16[:20])
    last_in_bf16 = sum(in_bf16[-20:])
    last_in_fp32 = sum(in_fp32[-20:])
    # The loss falls by more than 20 %, so 1 % tells it from one that does not fall.
    assert last_in_bf16 < 0.8 * first_in_bf16
    assert last_in_bf16 == pytest.approx(last_in_fp32, rel=0.01)


@pytest.fixture
def bf16_training(dataset):
    return training_of(config_of(precision="bf16"), dataset)


def test_copies_change_no_names(bf16_training, dataset):
    exact = training_of(config_of(precision="fp32"), dataset)
    names = bf16_training.module.model.state_dict().keys()
    assert names == exact.module.model.state_dict().keys()


def test_parameters_stay_in_fp32(bf16_training):
    dtypes = {parameter.dtype for parameter in bf16_training.module.parameters()}
    assert dtypes == {torch.float32}


WIDTH = 32
"""Width of the layers, and of all queries, keys or values of a token."""


def _attention_of_layers(training: Training):
    """Return the module with queries, keys and values of both layers."""
    return [layer.attention.self for layer in training.module.layers]


def test_one_matmul_gives_queries_keys_and_values(bf16_training):
    first, _ = _attention_of_layers(bf16_training)
    assert first.query.compute_weight.shape == (3 * WIDTH, WIDTH)


def test_queries_of_sparse_layer_have_their_own_matmul(bf16_training):
    # They have another input than keys and values: only the tokens to predict.
    _, last = _attention_of_layers(bf16_training)
    assert last.query.compute_weight.shape == (WIDTH, WIDTH)
    assert last.key.compute_weight.shape == (2 * WIDTH, WIDTH)


def test_copies_are_those_of_updated_weights(bf16_training, dataset):
    first, _ = _attention_of_layers(bf16_training)
    before = first.query.compute_weight.clone()
    bf16_training.step.run(micro_batches(dataset, config_of()), 1e-2)
    expected = torch.cat(
        [linear.weight for linear in (first.query, first.key, first.value)]
    ).bfloat16()
    assert torch.equal(first.query.compute_weight, expected)
    assert not torch.equal(first.query.compute_weight, before)


def test_no_result_is_held_after_a_step(bf16_training, dataset):
    first, _ = _attention_of_layers(bf16_training)
    bf16_training.step.run(micro_batches(dataset, config_of()), 1e-2)
    assert not first.query.results
