"""Weights that are cast once per step, compared with fp32 and with autocast, which
casts them in every layer."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.trainer import oracles
from trainer.build import RedrawnDropout, build_training
from trainer.config.train_config import ParallelSettings, TrainConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.model import masked_lm, precision
from trainer.model.masked_lm import cross_entropy
from trainer.model.packing import verify_working_copies
from trainer.model.precision import keep_norms_in_bf16, use_float8

CASES = [
    *itertools.product(
        (*oracles.FAMILIES, "esm", "eurobert"),
        [("selective", "padded"), ("full", "packed")],
    ),
    *itertools.product(("bert", "albert"), [("none", "packed")]),
    ("mpnet", ("none", "padded")),
]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_losses_and_gradient_are_as_near_to_fp32_as_autocasts(
    family, way, dataset, monkeypatch
):
    def learned(*, copies=True, **changes):
        """Loss of each token, and the gradient."""
        monkeypatch.setattr(
            masked_lm,
            "verify_working_copies",
            verify_working_copies if copies else lambda _: "for comparison",
        )
        config = oracles.config_of(
            family, activation_checkpointing=way[0], layout=way[1], **changes
        )
        training, batches = (
            oracles.training_of(config, dataset),
            oracles.micro_batches(dataset, config),
        )
        assert (training.module.working_copies is not None) == (
            copies and config.precision == "bf16"
        )
        with torch.no_grad():
            logits_KV, labels_K = training.module._predict(batches[0])
        losses_K = functional.cross_entropy(
            logits_KV.float(), labels_K, reduction="none"
        )
        return {"losses": losses_K}, oracles.gradients_of(training, batches)[1]

    exact, plain, found = (
        learned(),
        learned(precision="bf16", copies=False),
        learned(precision="bf16"),
    )
    for one, under_autocast, with_copies in zip(exact, plain, found, strict=True):
        near, limit = (
            oracles.relative_distance(one, other)
            for other in (with_copies, under_autocast)
        )
        assert 0 < near <= 1.5 * limit
    assert (
        oracles.relative_distance(
            found[1], learned(precision="bf16", micro_batch_size=2)[1]
        )
        < 2 * limit
    )
    if (family, way[0]) in [
        (one, "selective") for one in (*oracles.FAMILIES, "esm", "eurobert")
    ]:
        far = oracles.relative_distance(
            exact[1], learned(precision="bf16", residual_dtype="bf16")[1]
        )
        assert near != far < 3 * limit


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm", "eurobert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_residual_stream_has_its_dtype_in_every_layer(family, dtype, dataset):
    config, seen = oracles.config_of(family, precision="bf16", residual_dtype=dtype), []
    training = oracles.training_of(config, dataset)
    for layer in training.module.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.no_grad():
        training.module(oracles.micro_batches(dataset, config)[0])
    assert seen == len(training.module.layers) * [
        {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ]


def _losses(config: TrainConfig, dataset) -> list[float]:
    training = oracles.training_of(config, dataset)
    return [
        float(training.step.run([batch], 3e-3).loss)
        for batch in oracles.micro_batches(dataset, config, steps=300)
    ]


@pytest.mark.slow
def test_three_hundred_steps_end_with_the_loss_of_fp32(dataset):
    exact, found = (
        _losses(oracles.config_of(max_grad_norm=1.0, precision=one), dataset)
        for one in ("fp32", "bf16")
    )
    assert sum(found[-20:]) == pytest.approx(sum(exact[-20:]), rel=0.01)
    assert sum(found[-20:]) < 0.8 * sum(found[:20])


def test_one_matmul_gives_queries_keys_and_values_and_names_stay(dataset):
    plain, training = (
        oracles.training_of(oracles.config_of(precision=precision), dataset)
        for precision in ("fp32", "bf16")
    )
    assert (
        training.module.model.state_dict().keys()
        == plain.module.model.state_dict().keys()
    )
    assert all(
        parameter.dtype == torch.float32 for parameter in training.module.parameters()
    )
    first, last = (
        layer.attention.self for layer in training.module.model.bert.encoder.layer
    )
    assert (first.query.compute_weight.shape, last.key.compute_weight.shape) == (
        (96, 32),
        (64, 32),
    )
    training.step.run(oracles.micro_batches(dataset, oracles.config_of()), 1e-2)
    expected = torch.cat(
        [one.weight for one in (first.query, first.key, first.value)]
    ).bfloat16()
    assert torch.equal(first.query.compute_weight, expected)
    assert not first.query.results


@pytest.mark.parametrize(
    ("bias", "affine"), [(True, True), (False, True), (False, False)]
)
def test_a_layer_norm_that_keeps_bf16_returns_the_same_and_rounds_only_gradients(
    bias, affine
):
    torch.manual_seed(0)
    exact = torch.nn.LayerNorm(96, elementwise_affine=affine, bias=bias)
    for parameter in exact.parameters():
        parameter.data.normal_(1.0, 0.3)
    kept, inputs = copy.deepcopy(exact), torch.randn(2, 64, 96) * 3 + 1
    keep_norms_in_bf16([torch.nn.Sequential(kept)], torch.float32)
    results, gradients = [], []
    for norm in (exact, kept):
        taken = inputs.clone().requires_grad_()
        results.append(norm(taken))
        gradients.append(
            torch.autograd.grad(
                results[-1].square().sin().sum(), [taken, *norm.parameters()]
            )
        )
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for one, rounded in zip(*gradients, strict=True):
        assert (one - rounded).norm() < 0.004 * one.norm()
    assert affine == any(
        not torch.equal(*pair) for pair in list(zip(*gradients, strict=True))[1:2]
    )
    with torch.no_grad():
        assert torch.equal(kept(inputs), exact(inputs))


@pytest.mark.parametrize(
    ("family", "recipe"), [("bert", "tensorwise"), ("modernbert", "rowwise")]
)
def test_layers_learn_in_float8_with_gradients_near_those_of_bf16(
    torchao, family, recipe, dataset
):
    config = oracles.config_of(family, precision="bf16", max_grad_norm=1.0)
    batches = oracles.micro_batches(dataset, config, steps=10)

    def training(*, float8=False):
        found = oracles.training_of(config, dataset)
        if float8:
            use_float8(found.module.layers, recipe, emulate=True)
        return found

    def of_layers(gradients):
        return {
            name: gradient for name, gradient in gradients.items() if "layer" in name
        }

    plain, found = (
        oracles.gradients_of(training(float8=on), batches[:1]) for on in (False, True)
    )
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert (
        0.005
        < oracles.relative_distance(of_layers(plain[1]), of_layers(found[1]))
        < 0.1
    )
    if family == "modernbert":  # emulation is slow
        return
    steps = [training(float8=on).step for on in (False, True)]
    bf16, float8 = (
        [float(step.run([batch], 3e-3).loss) for batch in batches] for step in steps
    )
    assert float8[-1] == pytest.approx(bf16[-1], rel=0.01)
    assert float8[-1] < 0.95 * float8[0]


@pytest.mark.slow
def test_dropout_of_compiled_layers_is_the_same_and_keeps_a_seed_instead_of_the_mask():
    def learned(kind: type[nn.Dropout]):
        torch.manual_seed(0)
        layer, x, saved = (
            nn.Sequential(nn.Linear(64, 64), kind(0.25)),
            torch.ones(500, 64, requires_grad=True),
            [],
        )
        compiled = torch.compile(lambda x: layer(x), fullgraph=True)  # noqa: PLW0108 - torch leaves out a Sequential
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: saved.append(one.dtype) or one, lambda one: one
        ):
            result = compiled(x)
        result.sum().backward()
        assert torch.equal(layer.eval()(x), layer[0](x))
        return result.detach(), x.grad, torch.bool in saved

    (plain, gradient, keeps_mask), (found, same, still) = (
        learned(nn.Dropout),
        learned(RedrawnDropout),
    )
    assert (keeps_mask, still) == (True, False)
    assert float((found == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close((found, same), (plain, gradient))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert"])
def test_a_fused_loss_gets_what_the_last_layer_of_the_head_multiplies(
    family, dtype, dataset, monkeypatch
):
    def fused(hidden_KD, weight_VD, labels_K, bias_V):
        assert {one.dtype for one in (hidden_KD, weight_VD, bias_V)} == {
            training.module._dtype
        }
        return cross_entropy(functional.linear(hidden_KD, weight_VD, bias_V), labels_K)

    config = oracles.config_of(family, precision=dtype, layout="padded")
    training, batches = (
        oracles.training_of(config, dataset),
        oracles.micro_batches(dataset, config),
    )
    plain = oracles.gradients_of(training, batches)
    with torch.no_grad():
        loss, hits = training.module.evaluate(batches[0])
    monkeypatch.setattr(masked_lm, "EVALUATION_CHUNK_POSITIONS", 7)
    training.module.fused_loss = fused
    near = 1e-5 if dtype == "fp32" else 5e-3
    oracles.check_alike(
        plain, oracles.gradients_of(training, batches), loss=1e-5, gradient=near
    )
    with torch.no_grad():
        in_parts = training.module.evaluate(batches[0])
    assert (float(in_parts[0]), int(in_parts[1])) == (
        pytest.approx(float(loss), rel=1e-5),
        int(hits),
    )


@pytest.mark.parametrize(
    ("family", "changes", "said"),
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
def test_a_faster_way_that_cannot_be_computed_is_rejected(
    monkeypatch, dataset, family, changes, said
):
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    config = oracles.config_of(
        family, **{"device": "cuda", "precision": "bf16", "compile": True} | changes
    )
    nowhere = Ranks(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        device=torch.device("meta"),
    )
    with pytest.raises(BadConfig, match=said):
        build_training(config, 128, dataset.manifest.special_ids, nowhere)
