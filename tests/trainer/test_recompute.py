import functools

import pytest
import torch

from tests.trainer.oracles import (
    FAMILIES,
    SHAPES,
    attend_document_by_document,
    check_alike,
    config_of,
    gradients_of,
    learned,
    micro_batches,
    training_of,
)
from trainer import attention, narrow
from trainer.build import GraphCounter, keep_less
from trainer.config import ModelSettings
from trainer.errors import BadConfig


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile as far as graphs go, their backward included, without machine code, which takes a minute a family."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


@pytest.mark.parametrize("shape", [*(SHAPES[name] for name in FAMILIES), SHAPES["bert"] | DROPOUT],
                         ids=[*FAMILIES, "dropout"])  # fmt: skip
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_computing_activations_again_changes_neither_loss_nor_gradient(shape, checkpointing, dataset):
    model = ModelSettings(name="m", config=shape)
    again = learned(config_of(model=model, checkpointing=checkpointing), dataset)
    check_alike(again, learned(config_of(model=model), dataset), loss=1e-7)


@pytest.mark.parametrize("last_layer", ["predicted", "all"])
def test_less_is_kept_the_more_is_computed_again(last_layer, dataset):
    kept: dict[str, int] = {}
    for checkpointing in ("none", "selective", "full"):
        config = config_of(checkpointing=checkpointing, last_layer=last_layer)
        training = training_of(config, dataset)
        held: dict[int, int] = {}

        def pack(tensor, held=held):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training.module(*micro_batches(dataset, config))
        kept[checkpointing] = sum(held.values())
        loss.backward()
    # What selective checkpointing keeps it keeps in a cache of its own, which these hooks do not see.
    assert max(kept["full"], kept["selective"]) < kept["none"]
    training.model.supports_gradient_checkpointing = False
    with pytest.raises(BadConfig, match="no activation checkpointing"):
        keep_less(training.model, config)


def _check_compiled(config, dataset):
    """What compiled layers learn is the same, and micro-batches that differ in all but their shape compile no more."""
    torch._dynamo.reset()
    compiled = training_of(config.model_copy(update={"compile_layers": True}), dataset)
    batches = micro_batches(dataset, config, steps=8)
    # Names differ by nothing: layers are compiled in place.
    check_alike(gradients_of(compiled, batches[:1]), learned(config, dataset), loss=1e-5, gradient=1e-4)
    counter = GraphCounter()
    for batch in batches:
        compiled.step.run([batch], 1e-4)
        counter.stepped()
    assert len({batch.predicted_tokens for batch in batches}) > 1
    assert len({len(batch.starts_N) for batch in batches[3:]} | {len(batches[0].starts_N)}) > 1
    assert counter.recompilations == 0


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_machine_code(dataset):
    _check_compiled(config_of(), dataset)


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize(
    ("family", "checkpointing"), [("bert", "none"), ("modernbert", "none"), ("bert", "selective"), ("bert", "full")]
)
def test_compiled_layers_compute_the_same_and_are_compiled_once(family, checkpointing, dataset):
    _check_compiled(config_of(family, checkpointing=checkpointing), dataset)


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
    document = torch.arange(len(query_edges) - 1)
    asks, tells = (document.repeat_interleave(edges.diff()) for edges in (query_edges, key_edges))
    allowed = asks[:, None] == tells
    if window >= 0:  # all places ask
        place = torch.arange(len(key))
        allowed &= (place[:, None] - place).abs() <= window
    scale = query.shape[-1] ** -0.5
    q, g, k, v = (tensor.transpose(0, 1) for tensor in (query, gradient, key, value))
    weights = (q @ k.mT * scale).masked_fill(~allowed, -torch.inf).softmax(-1)
    of_weights = g @ v.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    return [one.transpose(0, 1).contiguous() for one in (of_scores @ k, of_scores.mT @ q, weights.mT @ g)]


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
def test_compiled_layers_take_any_number_of_documents(family, dataset, monkeypatch):
    expected = learned(config_of(family), dataset)
    monkeypatch.setattr(narrow, "varlen_attn", _as_an_operation)
    chosen = attention.ChosenAttention(kind="varlen", reason="test")
    monkeypatch.setattr("trainer.build.choose_attention", lambda *_, **__: chosen)
    check_alike(learned(config_of(family), dataset), expected)
    _check_compiled(config_of(family), dataset)


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
