"""Settings that are rejected as the GPU, a package or another setting is missing."""

import pytest
import torch

from tests.trainer.model.small_models import small_config
from tests.trainer.tiny_models import SHAPES, config_of
from trainer.build import build_training
from trainer.config import compilers
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import ModelSettings, ParallelSettings
from trainer.model import requirements
from trainer.model.fused_norms import check_fused_norms
from trainer.model.gelu_epilogues import check_gelu_epilogues
from trainer.runtime.ranks import Ranks

TANH = ModelSettings(name="m", config=SHAPES["bert"] | {"hidden_act": "gelu_new"})
"""A model whose GELU is the approximation by tanh."""


@pytest.fixture
def build(monkeypatch, dataset):
    """Return a function that builds a compiled bf16 training for a GPU.

    Optional packages are not installed, and tensors are on the meta device.
    """
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    ranks = Ranks(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        device=torch.device("meta"),
    )

    def build(family: str = "bert", **changes):
        settings = {"device": "cuda", "precision": "bf16", "compile": True} | changes
        config = config_of(family, **settings)
        manifest = dataset.manifest
        return build_training(config, manifest.vocab_size, manifest.special_ids, ranks)

    return build


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"device": "cpu"}, "requires float8 Tensor Cores", id="CPU"),
        pytest.param({"precision": "fp32"}, "float8 requires bf16", id="fp32"),
        pytest.param({"compile": False}, "requires compiled layers", id="not compiled"),
        pytest.param(
            {"parallel": ParallelSettings(strategy="fsdp2")},
            "float8 cannot be used with fsdp2",
            id="fsdp2",
        ),
        pytest.param({}, "requires torchao", id="not installed"),
    ],
)
def test_rejects_float8_that_cannot_be_used(build, changes, message):
    with pytest.raises(BadConfig, match=message):
        build(float8="rowwise", **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param("bert", {"device": "cpu"}, "requires a GPU", id="CPU"),
        pytest.param("bert", {"precision": "fp32"}, "requires bf16", id="fp32"),
        pytest.param(
            "bert",
            {"parallel": ParallelSettings(strategy="fsdp2")},
            "cannot be used with fsdp2",
            id="fsdp2",
        ),
        pytest.param(
            "modernbert", {}, "cannot be used with 'modernbert'", id="modernbert"
        ),
        pytest.param(
            "esm", {"layout": "padded"}, "cannot be used with 'esm'", id="esm"
        ),
    ],
)
def test_rejects_fused_norms_that_cannot_be_used(build, family, changes, message):
    with pytest.raises(BadConfig, match=message) as error:
        build(family, fused_norms=True, **changes)
    assert "train.fused_norms=false" in error.value.next_step


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param("bert", {"device": "cpu"}, "requires a GPU", id="CPU"),
        pytest.param("bert", {"precision": "fp32"}, "requires bf16", id="fp32"),
        pytest.param(
            "bert",
            {"parallel": ParallelSettings(strategy="fsdp2")},
            "cannot be used with fsdp2",
            id="fsdp2",
        ),
        pytest.param(
            "modernbert", {}, "cannot be used with 'modernbert'", id="modernbert"
        ),
        pytest.param("bert", {"model": TANH}, "requires hidden_act", id="tanh"),
    ],
)
def test_rejects_gelu_epilogues_that_cannot_be_used(build, family, changes, message):
    with pytest.raises(BadConfig, match=message) as error:
        build(family, gelu_epilogues=True, **changes)
    assert "train.gelu_epilogues=false" in error.value.next_step


def test_rejects_gelu_epilogues_with_float8():
    config = config_of(device="cuda", precision="bf16", float8="rowwise")
    with pytest.raises(BadConfig, match="cannot be used with float8"):
        check_gelu_epilogues(
            config,
            small_config("bert"),
            device=torch.device("meta"),
            has_copies=True,
        )


def test_rejects_kernels_without_triton(monkeypatch):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    config = config_of(device="cuda", precision="bf16")
    with pytest.raises(BadConfig, match="Triton is not installed"):
        check_gelu_epilogues(
            config,
            small_config("bert"),
            device=torch.device("cuda"),
            has_copies=True,
        )
    with pytest.raises(BadConfig, match="Triton is not installed"):
        check_fused_norms(config, "bert", hidden_size=32, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        pytest.param("bert", {"device": "cpu"}, "requires a GPU", id="CPU"),
        pytest.param(
            "bert", {"mlm_head": "dense"}, "requires a sparse MLM head", id="dense head"
        ),
        pytest.param(
            "esm",
            {"layout": "padded"},
            "whose head does not end in a linear layer",
            id="bias added to logits",
        ),
        pytest.param("modernbert", {}, "requires liger_kernel", id="not installed"),
    ],
)
def test_rejects_fused_loss_that_cannot_be_used(build, family, changes, message):
    with pytest.raises(BadConfig, match=message):
        build(family, fused_cross_entropy=True, **changes)
