"""Models whose layers compute with the kernels, compared with torch's own modules."""

import pytest
import torch

from tests.trainer.gradients import (
    LossAndGradients,
    loss_and_gradients,
    relative_distance,
)
from tests.trainer.tiny_models import SHAPES, config_of, micro_batches, training_of
from trainer.build import Training
from trainer.formats.train_config import ModelSettings, TrainConfig
from trainer.model import masked_lm

pytestmark = pytest.mark.interpreted

BF16_GRADIENT = 0.01
"""Relative distance of gradients whose intermediate values are rounded elsewhere: a few
roundings to bf16, which are 2**-8 each."""


@pytest.fixture(autouse=True)
def allow_cpu(monkeypatch):
    """Let the kernels compute on a CPU, which the setting rejects."""
    from trainer.model.kernels import residual_norm, residual_norm_triton

    # Triton's interpreter takes as long for a large tile as for a small one. Tests of
    # the kernels alone have the tiles of a GPU.
    monkeypatch.setattr(residual_norm_triton, "_TILE_ROWS", 64)
    monkeypatch.setattr(residual_norm, "_MIN_ROWS_PER_PROGRAM", 64)
    # Each test compiles another model by the same code.
    torch._dynamo.reset()
    for check in ("check_fused_norms", "check_gelu_epilogues"):
        monkeypatch.setattr(masked_lm, check, lambda *_, **__: None)


def small_config(family: str, *, dropout: float = 0.0, **changes) -> TrainConfig:
    shape = SHAPES[family] | {"hidden_dropout_prob": dropout}
    return config_of(
        family,
        model=ModelSettings(name="m", config=shape),
        precision="bf16",
        micro_batch_size=2,
        global_batch_size=2,
        **changes,
    )


NORMS = ("fused_norms",)
ALL = ("fused_norms", "gelu_epilogues")


def training_with(config: TrainConfig, dataset, kernels=NORMS) -> Training:
    torch.manual_seed(0)
    return training_of(config.model_copy(update=dict.fromkeys(kernels, True)), dataset)


def step_of(config: TrainConfig, dataset, kernels=NORMS) -> LossAndGradients:
    training = training_with(config, dataset, kernels)
    return loss_and_gradients(training, micro_batches(dataset, config))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("bert", {}, id="bert"),
        pytest.param("bert", {"residual_dtype": "bf16"}, id="bf16 residual"),
        pytest.param("bert", {"last_layer": "dense"}, id="dense last layer"),
        pytest.param("bert", {"compile": True}, id="compiled"),
        pytest.param(
            "bert",
            {"compile": True, "residual_dtype": "bf16"},
            id="compiled, bf16 residual",
        ),
        pytest.param("roberta", {}, id="roberta"),
        pytest.param("xlm-roberta", {}, id="xlm-roberta"),
    ],
)
def test_norms_learn_as_torch_modules_do(family, changes, dataset):
    config = small_config(family, **changes)
    expected = step_of(config, dataset, kernels=())
    actual = step_of(config, dataset)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-3)
    distance = relative_distance(expected.gradients, actual.gradients)
    assert 0 < distance < BF16_GRADIENT


@pytest.mark.parametrize("kernels", [("gelu_epilogues",), ALL], ids=["GELU", "both"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("bert", {}, id="bert"),
        pytest.param("bert", {"compile": True}, id="compiled"),
        pytest.param(
            "bert",
            {"activation_checkpointing": "selective"},
            id="selective checkpointing",
        ),
        pytest.param("roberta", {"residual_dtype": "bf16"}, id="roberta"),
    ],
)
def test_gelu_learns_as_torch_modules_do(family, changes, kernels, dataset):
    config = small_config(family, **changes)
    expected = step_of(config, dataset, kernels=())
    actual = step_of(config, dataset, kernels)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-3)
    distance = relative_distance(expected.gradients, actual.gradients)
    assert 0 < distance < BF16_GRADIENT


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_draws_the_same_masks(compiled, checkpointing, dataset):
    config = small_config("bert", dropout=0.3, compile=compiled)
    plain = step_of(config, dataset)
    checkpointed = config.model_copy(update={"activation_checkpointing": checkpointing})
    recomputed = step_of(checkpointed, dataset)
    # Another mask would change the loss by more than a tenth of a per cent.
    assert recomputed.loss == pytest.approx(plain.loss, rel=1e-6)
    assert relative_distance(plain.gradients, recomputed.gradients) < 1e-3


def test_masks_differ_between_layers_and_steps(dataset):
    config = small_config("bert", dropout=0.3)
    training = training_with(config, dataset)
    batches = micro_batches(dataset, config)
    losses = [loss_and_gradients(training, batches).loss for _ in range(2)]
    assert losses[0] != losses[1]


def test_every_norm_of_every_forward_has_a_seed(dataset):
    config = small_config("bert", dropout=0.3)
    training = training_with(config, dataset)
    batch = micro_batches(dataset, config)[0]
    outputs = [
        part for part in training.module.modules() if hasattr(part, "dropout_seed")
    ]
    drawn = []
    for _ in range(2):
        training.module(batch)
        seeds = [output.dropout_seed for output in outputs]
        # torch.compile copies inputs at other addresses.
        assert all(seed.data_ptr() % 16 == 0 for seed in seeds)
        drawn += [int(seed) for seed in seeds]
    assert len(outputs) == 2 * len(training.module.layers)
    assert len(set(drawn)) == 2 * len(outputs)


def test_evaluation_has_no_dropout(dataset):
    config = small_config("bert", dropout=0.3)
    training = training_with(config, dataset)
    batch = micro_batches(dataset, config)[0]
    training.module.eval()
    with torch.no_grad():
        losses = [training.module.evaluate(batch)[0] for _ in range(2)]
    training.module.train()
    assert losses[0] == losses[1]
    expected = training_with(config, dataset, kernels=()).module.eval()
    with torch.no_grad():
        assert float(losses[0]) == pytest.approx(
            float(expected.evaluate(batch)[0]), rel=1e-3
        )


def test_parameters_keep_their_names(dataset):
    config = small_config("bert")
    expected = training_with(config, dataset, kernels=()).module
    fused = training_with(config, dataset, ALL).module
    assert list(fused.state_dict()) == list(expected.state_dict())
    assert [type(part).__name__ for part in fused.modules()] == [
        type(part).__name__ for part in expected.modules()
    ]


def test_learns_patterns(dataset):
    config = small_config("bert", dropout=0.1)
    training = training_with(config, dataset)
    losses = [
        float(training.step.run([batch], 3e-3).loss)
        for batch in micro_batches(dataset, config, steps=15)
    ]
    assert losses[-1] < 0.95 * losses[0]
