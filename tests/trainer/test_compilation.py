import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.trainer import oracles
from trainer.compilation import WARM_UP_STEPS, GraphCounter, RedrawnDropout
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import TokenDataset

DROPPED_SHARE = 0.25


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile graphs of forward and backward, but run them without machine code.

    To generate machine code takes a minute for each family of models.
    """
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


def _check_compiled(config: TrainConfig, dataset: TokenDataset) -> None:
    """Assert that compiled layers learn the same, and are compiled once.

    Layers must not be compiled again for micro-batches of the same shape, however many
    documents and tokens to predict they have.
    """
    torch._dynamo.reset()  # other tests have compiled layers of the same code
    compiled = oracles.training_of(config.model_copy(update={"compile": True}), dataset)
    batches = oracles.micro_batches(dataset, config, steps=8)
    # This also compares the names of parameters, as layers are compiled in place. The
    # compiler may add up numbers in another order, in fp32.
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
    # The micro-batches do differ in their numbers of tokens to predict; in those of
    # documents even after the steps in which layers may be compiled.
    assert len({batch.predicted_tokens for batch in batches}) > 1
    later_batches = batches[WARM_UP_STEPS:]
    document_counts = {len(batch.starts_N) for batch in (batches[0], *later_batches)}
    assert len(document_counts) > 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutPass:
    """Forward and backward pass of a compiled layer with dropout."""

    result: torch.Tensor
    gradient: torch.Tensor
    """Gradient of the sum of the result with respect to the input."""
    keeps_mask: bool
    """True if a tensor of booleans is kept for the backward pass."""


def _drop_out(dropout: type[nn.Dropout]) -> DropoutPass:
    """Run a compiled linear layer with dropout, always with the same seed."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 64), dropout(DROPPED_SHARE))
    input = torch.ones(500, 64, requires_grad=True)
    saved_dtypes = []

    def note_dtype(tensor):
        saved_dtypes.append(tensor.dtype)
        return tensor

    compiled = torch.compile(lambda x: layer(x), fullgraph=True)  # noqa: PLW0108 - torch leaves out a Sequential
    with torch.autograd.graph.saved_tensors_hooks(note_dtype, lambda tensor: tensor):
        result = compiled(input)
    result.sum().backward()
    assert torch.equal(layer.eval()(input), layer[0](input))  # none in evaluation
    return DropoutPass(
        result=result.detach(),
        gradient=input.grad,
        keeps_mask=torch.bool in saved_dtypes,
    )


@pytest.mark.slow
def test_redrawn_dropout_keeps_seed_instead_of_mask():
    plain = _drop_out(nn.Dropout)
    redrawn = _drop_out(RedrawnDropout)
    assert plain.keeps_mask
    assert not redrawn.keeps_mask
    # Of 500 x 64 elements; 0.01 is four standard deviations, sqrt(0.25 * 0.75 / 32000).
    dropped_share = float((redrawn.result == 0).float().mean())
    assert dropped_share == pytest.approx(DROPPED_SHARE, abs=0.01)
    torch.testing.assert_close(
        (redrawn.result, redrawn.gradient), (plain.result, plain.gradient)
    )


@pytest.fixture
def graph_counter() -> GraphCounter:
    """A counter after the steps in which compilation is expected."""
    counter = GraphCounter()
    for _ in range(WARM_UP_STEPS + 2):
        counter.stepped()
    return counter


def test_counts_graph_compiled_after_first_steps(graph_counter):
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(3))
    assert graph_counter.recompilations == 1


def test_does_not_count_graphs_while_paused(graph_counter):
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with graph_counter.paused():
        function(torch.ones(3))
    assert graph_counter.recompilations == 0
