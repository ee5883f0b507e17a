"""Weights that are cast once per step.

They are compared with fp32, and with autocast, which casts weights in every layer.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.trainer import oracles
from trainer.build import build_training
from trainer.compilation import RedrawnDropout
from trainer.config.train_config import ParallelSettings, TrainConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.model import masked_lm, precision
from trainer.model.masked_lm import cross_entropy
from trainer.model.packing import verify_working_copies
from trainer.model.precision import keep_norms_in_bf16, use_float8

MAIN_FAMILIES = (*oracles.FAMILIES, "esm", "eurobert")
CASES = [
    *((family, "selective", "padded") for family in MAIN_FAMILIES),
    *((family, "full", "packed") for family in MAIN_FAMILIES),
    ("bert", "none", "packed"),
    ("albert", "none", "packed"),
    ("mpnet", "none", "padded"),
]


@pytest.mark.parametrize(("family", "activation_checkpointing", "layout"), CASES)
def test_bf16_is_as_near_to_fp32_as_autocast(
    family, activation_checkpointing, layout, dataset, monkeypatch
):
    def learned(*, copies=True, **changes):
        """Return the loss of each token, and the gradient."""
        monkeypatch.setattr(
            masked_lm,
            "verify_working_copies",
            verify_working_copies if copies else lambda _: "for comparison",
        )
        config = oracles.config_of(
            family,
            activation_checkpointing=activation_checkpointing,
            layout=layout,
            **changes,
        )
        training = oracles.training_of(config, dataset)
        batches = oracles.micro_batches(dataset, config)
        assert (training.module.working_copies is not None) == (
            copies and config.precision == "bf16"
        )
        with torch.no_grad():
            logits_KV, labels_K = training.module._predict(batches[0])
        losses_K = functional.cross_entropy(
            logits_KV.float(), labels_K, reduction="none"
        )
        return {"losses": losses_K}, oracles.gradients_of(training, batches).gradients

    exact_losses, exact_gradients = learned()
    autocast_losses, autocast_gradients = learned(precision="bf16", copies=False)
    losses, gradients = learned(precision="bf16")

    autocast_error = oracles.relative_distance(exact_losses, autocast_losses)
    error = oracles.relative_distance(exact_losses, losses)
    assert 0 < error <= 1.5 * autocast_error

    autocast_error = oracles.relative_distance(exact_gradients, autocast_gradients)
    error = oracles.relative_distance(exact_gradients, gradients)
    assert 0 < error <= 1.5 * autocast_error

    _, accumulated = learned(precision="bf16", micro_batch_size=2)
    distance = oracles.relative_distance(gradients, accumulated)
    assert distance < 2 * autocast_error
    if activation_checkpointing == "selective":
        _, with_bf16_residual = learned(precision="bf16", residual_dtype="bf16")
        residual_error = oracles.relative_distance(exact_gradients, with_bf16_residual)
        assert error != residual_error < 3 * autocast_error


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm", "eurobert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_residual_stream_has_its_dtype(family, dtype, dataset):
    config = oracles.config_of(family, precision="bf16", residual_dtype=dtype)
    input_dtypes = []
    training = oracles.training_of(config, dataset)
    for layer in training.module.layers:
        layer.register_forward_pre_hook(
            lambda _, args: input_dtypes.append(args[0].dtype)
        )
    with torch.no_grad():
        training.module(oracles.micro_batches(dataset, config)[0])
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert input_dtypes == [expected] * len(training.module.layers)


def _losses(config: TrainConfig, dataset) -> list[float]:
    training = oracles.training_of(config, dataset)
    return [
        float(training.step.run([batch], 3e-3).loss)
        for batch in oracles.micro_batches(dataset, config, steps=300)
    ]


@pytest.mark.slow
def test_training_ends_with_loss_of_fp32(dataset):
    exact, in_bf16 = (
        _losses(oracles.config_of(max_grad_norm=1.0, precision=dtype), dataset)
        for dtype in ("fp32", "bf16")
    )
    assert sum(in_bf16[-20:]) == pytest.approx(sum(exact[-20:]), rel=0.01)
    assert sum(in_bf16[-20:]) < 0.8 * sum(in_bf16[:20])


@pytest.fixture
def bf16_training(dataset):
    return oracles.training_of(oracles.config_of(precision="bf16"), dataset)


def test_copies_change_no_names(bf16_training, dataset):
    exact = oracles.training_of(oracles.config_of(precision="fp32"), dataset)
    names = bf16_training.module.model.state_dict().keys()
    assert names == exact.module.model.state_dict().keys()


def test_parameters_stay_in_fp32(bf16_training):
    dtypes = {parameter.dtype for parameter in bf16_training.module.parameters()}
    assert dtypes == {torch.float32}


def test_one_matmul_gives_queries_keys_and_values(bf16_training, dataset):
    first, last = (
        layer.attention.self for layer in bf16_training.module.model.bert.encoder.layer
    )
    assert first.query.compute_weight.shape == (96, 32)
    # The last layer is sparse: its queries have another input.
    assert last.key.compute_weight.shape == (64, 32)
    bf16_training.step.run(oracles.micro_batches(dataset, oracles.config_of()), 1e-2)
    expected = torch.cat(
        [linear.weight for linear in (first.query, first.key, first.value)]
    ).bfloat16()
    assert torch.equal(first.query.compute_weight, expected)
    assert not first.query.results


@pytest.mark.parametrize(
    ("bias", "affine"), [(True, True), (False, True), (False, False)]
)
def test_norm_that_keeps_bf16_rounds_only_gradients(bias, affine):
    torch.manual_seed(0)
    exact = torch.nn.LayerNorm(96, elementwise_affine=affine, bias=bias)
    for parameter in exact.parameters():
        parameter.data.normal_(1.0, 0.3)
    kept = copy.deepcopy(exact)
    inputs = torch.randn(2, 64, 96) * 3 + 1
    keep_norms_in_bf16([torch.nn.Sequential(kept)], torch.float32)

    def result_and_gradients(norm):
        leaf = inputs.clone().requires_grad_()
        result = norm(leaf)
        gradients = torch.autograd.grad(
            result.square().sin().sum(), [leaf, *norm.parameters()]
        )
        return result, gradients

    exact_result, exact_gradients = result_and_gradients(exact)
    kept_result, kept_gradients = result_and_gradients(kept)
    torch.testing.assert_close(exact_result, kept_result, rtol=1e-5, atol=1e-5)
    for gradient, rounded in zip(exact_gradients, kept_gradients, strict=True):
        assert (gradient - rounded).norm() < 0.004 * gradient.norm()
    if affine:
        # The weight's gradient is rounded.
        assert not torch.equal(exact_gradients[1], kept_gradients[1])
    with torch.no_grad():
        assert torch.equal(kept(inputs), exact(inputs))


@pytest.mark.parametrize(
    ("family", "recipe"), [("bert", "tensorwise"), ("modernbert", "rowwise")]
)
def test_float8_learns_as_bf16_does(torchao, family, recipe, dataset):
    config = oracles.config_of(family, precision="bf16", max_grad_norm=1.0)
    batches = oracles.micro_batches(dataset, config, steps=10)

    def build(*, float8: bool):
        training = oracles.training_of(config, dataset)
        if float8:
            use_float8(training.module.layers, recipe, emulate=True)
        return training

    def layer_gradients(learned: oracles.Learned):
        return {
            name: gradient
            for name, gradient in learned.gradients.items()
            if "layer" in name
        }

    in_bf16 = oracles.gradients_of(build(float8=False), batches[:1])
    in_float8 = oracles.gradients_of(build(float8=True), batches[:1])
    assert in_float8.loss == pytest.approx(in_bf16.loss, rel=1e-3)
    distance = oracles.relative_distance(
        layer_gradients(in_bf16), layer_gradients(in_float8)
    )
    assert 0.005 < distance < 0.1
    if family == "modernbert":  # emulation is slow
        return
    steps = [build(float8=float8).step for float8 in (False, True)]
    bf16_losses, float8_losses = (
        [float(step.run([batch], 3e-3).loss) for batch in batches] for step in steps
    )
    assert float8_losses[-1] == pytest.approx(bf16_losses[-1], rel=0.01)
    assert float8_losses[-1] < 0.95 * float8_losses[0]


@pytest.mark.slow
def test_redrawn_dropout_keeps_seed_instead_of_mask():
    def learned(kind: type[nn.Dropout]):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(64, 64), kind(0.25))
        input = torch.ones(500, 64, requires_grad=True)
        saved_dtypes = []

        def pack(tensor):
            saved_dtypes.append(tensor.dtype)
            return tensor

        compiled = torch.compile(lambda x: layer(x), fullgraph=True)  # noqa: PLW0108 - torch leaves out a Sequential
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = compiled(input)
        result.sum().backward()
        assert torch.equal(layer.eval()(input), layer[0](input))
        return result.detach(), input.grad, torch.bool in saved_dtypes

    expected, expected_gradient, keeps_mask = learned(nn.Dropout)
    assert keeps_mask
    result, gradient, keeps_mask = learned(RedrawnDropout)
    assert not keeps_mask
    assert float((result == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close((result, gradient), (expected, expected_gradient))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
def test_fused_loss_replaces_last_layer_of_head(family, dtype, dataset, monkeypatch):
    def fused(hidden_KD, weight_VD, labels_K, bias_V):
        dtypes = {tensor.dtype for tensor in (hidden_KD, weight_VD, bias_V)}
        assert dtypes == {training.module._dtype}
        return cross_entropy(functional.linear(hidden_KD, weight_VD, bias_V), labels_K)

    config = oracles.config_of(family, precision=dtype, layout="padded")
    training = oracles.training_of(config, dataset)
    batches = oracles.micro_batches(dataset, config)
    expected = oracles.gradients_of(training, batches)
    with torch.no_grad():
        loss, hits = training.module.evaluate(batches[0])
    monkeypatch.setattr(masked_lm, "EVALUATION_CHUNK_POSITIONS", 7)
    training.module.fused_loss = fused
    oracles.check_alike(
        expected,
        oracles.gradients_of(training, batches),
        loss=1e-5,
        gradient=1e-5 if dtype == "fp32" else 5e-3,
    )
    with torch.no_grad():
        loss_of_chunks, hits_of_chunks = training.module.evaluate(batches[0])
    assert float(loss_of_chunks) == pytest.approx(float(loss), rel=1e-5)
    assert int(hits_of_chunks) == int(hits)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "bert",
            {"device": "cpu", "float8": "rowwise"},
            "requires float8 Tensor Cores",
        ),
        ("bert", {"precision": "fp32", "float8": "rowwise"}, "float8 requires bf16"),
        ("bert", {"compile": False, "float8": "rowwise"}, "requires compiled layers"),
        (
            "bert",
            {"parallel": ParallelSettings(strategy="fsdp2"), "float8": "rowwise"},
            "float8 cannot be used with fsdp2",
        ),
        ("bert", {"float8": "rowwise"}, "requires torchao"),
        ("bert", {"device": "cpu", "fused_cross_entropy": True}, "requires a GPU"),
        (
            "bert",
            {"mlm_head": "dense", "fused_cross_entropy": True},
            "requires a sparse MLM head",
        ),
        (
            "esm",
            {"layout": "padded", "fused_cross_entropy": True},
            "whose head does not end in a linear layer",
        ),
        ("modernbert", {"fused_cross_entropy": True}, "requires liger_kernel"),
    ],
)
def test_rejects_optimisation_that_cannot_be_used(
    monkeypatch, dataset, family, changes, message
):
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    config = oracles.config_of(
        family, **{"device": "cuda", "precision": "bf16", "compile": True} | changes
    )
    without_gpu = Ranks(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        device=torch.device("meta"),
    )
    with pytest.raises(BadConfig, match=message):
        build_training(config, 128, dataset.manifest.special_ids, without_gpu)
