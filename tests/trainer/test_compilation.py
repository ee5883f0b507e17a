import functools

import pytest
import torch
from torch import nn

from tests.trainer import oracles
from trainer.compilation import WARM_UP_STEPS, GraphCounter, RedrawnDropout
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import TokenDataset


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile as far as graphs go, their backward included.

    Machine code takes a minute a family.
    """
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


def _check_compiled(config: TrainConfig, dataset: TokenDataset) -> None:
    """Assert that compiled layers learn the same, and are compiled once.

    Micro-batches that differ in all but their shape do not compile layers again.
    """
    torch._dynamo.reset()
    compiled = oracles.training_of(config.model_copy(update={"compile": True}), dataset)
    batches = oracles.micro_batches(dataset, config, steps=8)
    # This also compares names: layers are compiled in place.
    oracles.check_alike(
        oracles.gradients_of(compiled, batches[:1]),
        oracles.learned(config, dataset),
        loss=1e-5,
        gradient=1e-4,
    )
    counter = GraphCounter()
    for batch in batches:
        compiled.step.run([batch], 1e-4)
        counter.stepped()
    assert counter.recompilations == 0
    # The batches do differ, and not only while compilation is expected.
    assert len({batch.predicted_tokens for batch in batches}) > 1
    after_warm_up = batches[WARM_UP_STEPS:]
    assert len({len(batch.starts_N) for batch in (batches[0], *after_warm_up)}) > 1


@pytest.mark.slow
def test_machine_code_computes_the_same(dataset):
    _check_compiled(oracles.config_of(), dataset)


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(
    ("family", "activation_checkpointing"),
    [
        ("bert", "none"),
        ("modernbert", "none"),
        ("bert", "selective"),
        ("bert", "full"),
        ("esm", "full"),
    ],
)
def test_layers_compile_once_and_compute_the_same(
    family, activation_checkpointing, dataset
):
    _check_compiled(
        oracles.config_of(family, activation_checkpointing=activation_checkpointing),
        dataset,
    )


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "varlen"),
        ("modernbert", "varlen"),
        ("eurobert", "varlen"),
        ("bert", "fa3"),
    ],
)
def test_compiled_layers_take_all_numbers_of_documents(
    family, kind, dataset, monkeypatch
):
    expected = oracles.learned(oracles.config_of(family), dataset)
    oracles.choose_varlen(monkeypatch, kind)
    oracles.check_alike(oracles.learned(oracles.config_of(family), dataset), expected)
    _check_compiled(oracles.config_of(family), dataset)


@pytest.mark.slow
def test_redrawn_dropout_keeps_seed_instead_of_mask():
    def learned(kind: type[nn.Dropout]):
        """Return the result, its gradient, and whether a mask is kept for backward."""
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


@pytest.fixture
def graph_counter() -> GraphCounter:
    """A counter after the first steps."""
    counter = GraphCounter()
    for _ in range(5):
        counter.stepped()
    return counter


def test_counts_graph_compiled_after_first_steps(graph_counter):
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(3))
    assert graph_counter.recompilations == 1


def test_does_not_count_graphs_of_others(graph_counter):
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with graph_counter.paused():
        function(torch.ones(3))
    assert graph_counter.recompilations == 0
