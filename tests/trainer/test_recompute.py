import functools

import pytest
import torch

from tests.trainer.oracles import (
    attend_document_by_document,
    config_of,
    gradients_of,
    micro_batches,
    relative_distance,
    training_of,
)
from trainer import attention, narrow
from trainer.build import GraphCounter
from trainer.config import ModelSettings
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig

FAMILIES = ("bert", "roberta", "modernbert")


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile as far as graphs go, their backward included, without machine code, which takes a minute a family."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_computing_activations_again_changes_neither_loss_nor_gradient(family, checkpointing, patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(family)
    loss, gradients = gradients_of(training_of(config, dataset), micro_batches(dataset, config))
    again = training_of(config.model_copy(update={"checkpointing": checkpointing}), dataset)
    again_loss, again_gradients = gradients_of(again, micro_batches(dataset, config))
    assert again_loss == pytest.approx(loss, rel=1e-7)
    assert relative_distance(gradients, again_gradients) < 1e-6


def test_computing_activations_again_draws_the_same_dropout(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    shape = config_of().model.config | {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    config = config_of(model=ModelSettings(name="m", config=shape))
    found = {}
    for checkpointing in ("none", "selective", "full"):
        training = training_of(config.model_copy(update={"checkpointing": checkpointing}), dataset)
        found[checkpointing] = gradients_of(training, micro_batches(dataset, config))[1]
    assert relative_distance(found["none"], found["full"]) < 1e-6
    assert relative_distance(found["none"], found["selective"]) < 1e-6


@pytest.mark.parametrize("last_layer", ["predicted", "all"])
def test_less_is_kept_the_more_is_computed_again(last_layer, patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    kept: dict[str, int] = {}
    for checkpointing in ("none", "selective", "full"):
        config = config_of(checkpointing=checkpointing, last_layer=last_layer)
        training = training_of(config, dataset)
        (batch,) = micro_batches(dataset, config)
        held: dict[int, int] = {}

        def pack(tensor, held=held):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training.module(batch)
        kept[checkpointing] = sum(held.values())
        loss.backward()
    # What selective checkpointing keeps it keeps in a cache of its own, which these hooks do not see.
    assert kept["full"] < kept["none"]
    assert kept["selective"] < kept["none"]


def test_an_architecture_without_checkpointing_is_refused(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    shape = {"model_type": "electra", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
             "intermediate_size": 64, "embedding_size": 32}  # fmt: skip
    config = config_of(model=ModelSettings(name="m", config=shape), layout="padded", checkpointing="full")
    from trainer.build import keep_less

    model = training_of(config.model_copy(update={"checkpointing": "none"}), dataset).model
    model.supports_gradient_checkpointing = False
    with pytest.raises(BadConfig, match="no activation checkpointing"):
        keep_less(model, config)


@pytest.mark.parametrize(
    ("family", "machine_code"),
    [pytest.param("bert", True, marks=pytest.mark.slow), ("bert", False), ("modernbert", False)],
)
def test_compiled_layers_compute_the_same_and_are_compiled_once(family, machine_code, patterned_dataset, request):
    """Micro-batches of packed rows differ in their documents and in what is to be predicted, and never in shape."""
    if not machine_code:
        request.getfixturevalue("aot_eager")
    torch._dynamo.reset()
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(family)
    batches = micro_batches(dataset, config, steps=8)
    loss, gradients = gradients_of(training_of(config, dataset), batches[:1])
    compiled = training_of(config.model_copy(update={"compile_layers": True}), dataset)
    compiled_loss, compiled_gradients = gradients_of(compiled, batches[:1])
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    # Names differ by nothing: layers are compiled in place.
    assert relative_distance(gradients, compiled_gradients) < 1e-4
    counter = GraphCounter()
    for batch in batches:
        compiled.step.run([batch], 1e-4)
        counter.stepped()
    assert len({batch.predicted_tokens for batch in batches}) > 1
    assert counter.recompilations == 0


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_compiled_layers_can_compute_activations_again(checkpointing, patterned_dataset):
    torch._dynamo.reset()
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of()
    batches = micro_batches(dataset, config, steps=5)
    _, gradients = gradients_of(training_of(config, dataset), batches[:1])
    both = training_of(config.model_copy(update={"compile_layers": True, "checkpointing": checkpointing}), dataset)
    assert relative_distance(gradients, gradients_of(both, batches[:1])[1]) < 1e-4
    counter = GraphCounter()
    for batch in batches:
        both.step.run([batch], 1e-4)
        counter.stepped()
    assert counter.recompilations == 0


@torch.library.custom_op("tests::varlen", mutates_args=())
def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_edges: torch.Tensor, key_edges: torch.Tensor,
    window: int,
) -> torch.Tensor:  # fmt: skip
    reach = (window, window)
    return attend_document_by_document(query, key, value, query_edges, key_edges, 10**6, 10**6, window_size=reach)


@_varlen.register_fake
def _(query, key, value, query_edges, key_edges, window):
    return torch.empty_like(query)


@torch.library.custom_op("tests::varlen_backward", mutates_args=())
def _varlen_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_edges: torch.Tensor,
    key_edges: torch.Tensor, window: int,
) -> list[torch.Tensor]:  # fmt: skip
    # By hand, as autograd does not reach into an operation.
    found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    scale = query.shape[-1] ** -0.5
    for number in range(len(query_edges) - 1):
        asked = slice(int(query_edges[number]), int(query_edges[number + 1]))
        known = slice(int(key_edges[number]), int(key_edges[number + 1]))
        q, g, k, v = (
            tensor[part].transpose(0, 1)
            for tensor, part in ((query, asked), (gradient, asked), (key, known), (value, known))
        )
        scores = q @ k.transpose(1, 2) * scale
        if window >= 0:
            place = torch.arange(k.shape[1])
            scores = scores.masked_fill((place[:, None] - place[None, :]).abs() > window, -torch.inf)
        weights = scores.softmax(-1)
        of_weights = g @ v.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found[0][asked] = (of_scores @ k).transpose(0, 1)
        found[1][known] = (of_scores.transpose(1, 2) @ q).transpose(0, 1)
        found[2][known] = (weights.transpose(1, 2) @ g).transpose(0, 1)
    return found


@_varlen_backward.register_fake
def _(gradient, query, key, value, query_edges, key_edges, window):
    return [torch.empty_like(tensor) for tensor in (query, key, value)]


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.window = inputs[5]


def _back(ctx, gradient):
    return (*_varlen_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.window), None, None, None)


_varlen.register_autograd(_back, setup_context=_keep)


def _as_an_operation(query, key, value, query_edges, key_edges, _, most_keys, *, window_size, scale):
    """One document after the other, closed to the compiler as the kernel is."""
    return _varlen(query, key, value, query_edges, key_edges, window_size[0] if window_size[0] < most_keys else -1)


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_compiled_layers_take_any_number_of_documents(family, patterned_dataset, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(narrow, "varlen_attn", _as_an_operation)
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(family)
    loss, gradients = gradients_of(training_of(config, dataset), micro_batches(dataset, config))
    chosen = attention.ChosenAttention(kind="varlen", reason="test")
    monkeypatch.setattr("trainer.build.choose_attention", lambda *_, **__: chosen)
    compiled = training_of(config.model_copy(update={"compile_layers": True}), dataset)
    batches = micro_batches(dataset, config, steps=8)
    counter = GraphCounter()
    compiled_loss, compiled_gradients = gradients_of(compiled, batches[:1])
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert relative_distance(gradients, compiled_gradients) < 1e-4
    for batch in batches:
        compiled.step.run([batch], 1e-4)
        counter.stepped()
    assert len({len(batch.starts_N) for batch in batches[3:]} | {len(batches[0].starts_N)}) > 1
    assert counter.recompilations == 0


def test_a_graph_compiled_after_the_first_steps_is_counted_unless_it_is_none_of_trainings():
    counter = GraphCounter()
    for _ in range(5):
        counter.stepped()
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with counter.elsewhere():
        function(torch.ones(3))
    assert counter.recompilations == 0
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(3))
    assert counter.recompilations == 1
