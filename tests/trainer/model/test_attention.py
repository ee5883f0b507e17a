import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from tests.trainer import oracles
from trainer.activation_checkpointing import checkpoint_activations
from trainer.compilation import GraphCounter
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.data.micro_batch import MicroBatch
from trainer.errors import BadConfig
from trainer.model import attention, sparse_last_layer
from trainer.model.attention import (
    Packing,
    attend_within_documents,
    choose_attention,
    document_positions,
    pin_kernels,
)
from trainer.model.encoder import build_config, build_model
from trainer.model.masked_lm import MaskedLM
from trainer.model.packing import verify_packing

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
META = torch.device("meta")


def _model_config(family: str = "bert", dropout: float = 0.0, **changes):
    config = oracles.config_of(family, **changes)
    return config, build_config(
        config.model,
        vocab_size=100,
        special_ids=IDS,
        seq_length_tokens=64,
        attention_dropout=dropout,
    )


@pytest.fixture
def batch(dataset) -> MicroBatch:
    return oracles.micro_batches(dataset, oracles.config_of())[0]


def _choose_varlen(monkeypatch, kind="varlen"):
    """Let trainings use attention by document, without its kernels."""
    # FlashAttention 3 hangs on empty documents.
    attend = functools.partial(
        oracles.attend_within_edges, min_length=1 if kind == "fa3" else 0
    )
    monkeypatch.setattr(sparse_last_layer, "varlen_attn", attend)

    def choose(*arguments):
        return dataclasses.replace(choose_attention(*arguments), kind=kind)

    monkeypatch.setattr("trainer.build.choose_attention", choose)


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
def test_document_influences_itself_only(family, kind, dataset, monkeypatch):
    """Each token of one document is changed.

    The logits of all others stay as they were, to the last bit.
    """
    monkeypatch.setattr(sparse_last_layer, "varlen_attn", oracles.attend_within_edges)
    # Without masks, as the perturbed document is to differ in all its tokens.
    config = oracles.config_of(
        family, mlm_head="dense", micro_batch_size=2, global_batch_size=2
    )
    training = oracles.training_of(config, dataset)
    if kind == "varlen":
        training.module.model.config._attn_implementation = attention.VARLEN_NAME
    training.module.attention = dataclasses.replace(
        training.module.attention, kind=kind
    )
    training.module.eval()
    (batch,) = oracles.micro_batches(dataset, config)
    document = len(batch.starts_N) // 2
    start = int(batch.starts_N[document])
    end = start + int(batch.tokens_N[document])
    is_changed_T = torch.zeros(batch.ids_BS.numel(), dtype=torch.bool)
    is_changed_T[start:end] = True
    ids_BS = batch.wide_ids_BS()
    changed_BS = torch.where(is_changed_T.view_as(ids_BS), (ids_BS + 1) % 120, ids_BS)
    changed_batch = dataclasses.replace(batch, ids_BS=changed_BS.to(torch.uint16))
    with torch.no_grad():
        before_TV, _ = training.module._predict(batch)
        after_TV, _ = training.module._predict(changed_batch)
    assert torch.equal(before_TV[~is_changed_T], after_TV[~is_changed_T])
    # And every token of it does influence it.
    difference_TV = (before_TV - after_TV)[is_changed_T].abs()
    assert (difference_TV.amax(dim=1) > 0).all()


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded", "bucketed"])
@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_varlen_learns_what_masked_sequences_do(
    family, layout, last_layer, dataset, monkeypatch
):
    config = oracles.config_of(family, layout=layout, last_layer=last_layer)
    expected = oracles.learned(config, dataset)
    _choose_varlen(monkeypatch)
    oracles.check_alike(oracles.learned(config, dataset), expected, gradient=1e-5)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_varlen_step_traces_on_meta_device(family, batch):
    config, model_config = _model_config(
        family, precision="bf16", device="cuda", compile=False
    )
    chosen = choose_attention(config, model_config, META, verify_packing(model_config))
    assert chosen.kind == "varlen"
    model = build_model(model_config, META, attention.VARLEN_NAME).to(torch.bfloat16)
    loss = MaskedLM(model, config, chosen)(batch.to(META))
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_varlen_rejects_dropout():
    heads = [torch.empty(1, 2, 8, 16, device=META) for _ in range(3)]
    edges = torch.empty(2, dtype=torch.int32, device=META)
    with pytest.raises(ValueError, match="neither dropout nor masks"):
        attend_within_documents(
            torch.nn.Module(),
            *heads,
            None,
            cu_seq_lens_q=edges,
            max_length_q=8,
            dropout=0.1,
        )


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("cpu", {"precision": "bf16"}, "requires a GPU"),
        ("meta", {"precision": "bf16", "device": "cpu"}, "requires a GPU"),
        ("meta", {"precision": "fp32", "device": "cuda"}, "bf16"),
        (
            "meta",
            {"precision": "bf16", "device": "cuda", "dropout": 0.1},
            "attention dropout",
        ),
    ],
)
class TestVarlenThatCannotBeUsed:
    @pytest.mark.parametrize("kind", ["varlen", "fa3"])
    def test_is_rejected_if_configured(self, device, changes, reason, kind):
        config, model_config = _model_config(attention=kind, **changes)
        with pytest.raises(BadConfig, match=reason):
            choose_attention(config, model_config, torch.device(device), Packing())

    def test_is_left_by_auto(self, device, changes, reason):
        config, model_config = _model_config(attention="auto", **changes)
        chosen = choose_attention(config, model_config, torch.device(device), Packing())
        assert chosen.kind == "sdpa"
        assert reason in chosen.reason


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_rejects_flash_attention_3_without_hopper(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    config, model_config = _model_config(
        precision="bf16", device="cuda", attention="fa3"
    )
    with pytest.raises(BadConfig, match="requires a Hopper GPU, not another"):
        choose_attention(config, model_config, torch.device("cuda"), Packing())


def test_activates_flash_attention_3_only_if_chosen(monkeypatch):
    monkeypatch.setitem(
        _registry._FLASH_ATTENTION_IMPLS,
        "FA3",
        lambda: SimpleNamespace(remove=lambda: None),
    )
    for kind, active in (
        ("fa3", "FA3"),
        ("varlen", None),
        ("fa3", "FA3"),
        ("sdpa", None),
    ):
        pin_kernels(kind)
        assert current_flash_attention_impl() == active


def test_rejects_flash_attention_3_that_is_not_installed():
    with pytest.raises(BadConfig, match="No module named 'flash_attn_interface'"):
        pin_kernels("fa3")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("bert", "packed"), ("bert", "padded"), ("modernbert", "packed")],
)
def test_flash_attention_3_gets_no_empty_segment(family, layout, dataset, monkeypatch):
    """With so few masks that most documents have none."""
    config = oracles.config_of(family, layout=layout, masking_probability=0.02)
    with_mask = oracles.training_of(config, dataset)
    _choose_varlen(monkeypatch, "fa3")
    with_fa3 = oracles.training_of(config, dataset)
    for number, batch in enumerate(oracles.micro_batches(dataset, config, steps=5)):
        with_fa3.module._fixed_slots = 64 if number % 2 else None  # as on GPUs
        # Some sequences have no documents.
        empty_sequences = number % 3
        varied = dataclasses.replace(
            batch,
            ids_BS=torch.cat(
                [batch.ids_BS, torch.zeros_like(batch.ids_BS[:empty_sequences])]
            ),
            padded_sequences=batch.padded_sequences + empty_sequences,
        )
        oracles.check_alike(
            oracles.gradients_of(with_fa3, [varied]),
            oracles.gradients_of(with_mask, [varied]),
            gradient=1e-5,
        )


def test_rejects_packing_of_encoder_that_cannot():
    config, model_config = _model_config()
    with pytest.raises(BadConfig, match=r"neither packed sequences .*: for a reason"):
        choose_attention(config, model_config, torch.device("cpu"), "for a reason")


def test_encoder_that_cannot_be_packed_uses_padding_mask():
    config, model_config = _model_config()
    padded = config.model_copy(update={"layout": "padded"})
    chosen = choose_attention(padded, model_config, torch.device("cpu"), "for a reason")
    assert (chosen.kind, chosen.reason) == ("row", "padding mask of bert: for a reason")


def test_names_changed_attention_dropout(dataset):
    shape = oracles.SHAPES["bert"] | {"attention_probs_dropout_prob": 0.1}
    config = oracles.config_of(
        model=ModelSettings(name="m", config=shape), attention_dropout=0.0
    )
    training = oracles.training_of(config, dataset)
    assert training.recipe_changes == ["attention dropout 0 instead of the model's 0.1"]
    assert training.module.model.config.attention_probs_dropout_prob == 0
    unchanged = config.model_copy(update={"attention_dropout": None})
    assert oracles.training_of(unchanged, dataset).recipe_changes == []


@pytest.fixture(params=[2, 7, 8], ids=lambda count: f"{count} empty sequences")
def sparse_batch(request, dataset) -> MicroBatch:
    """A micro-batch of which some sequences have no documents, or all."""
    empty_sequences = request.param
    if empty_sequences == 8:
        return _empty_batch()
    config = oracles.config_of(
        micro_batch_size=8, global_batch_size=8 - empty_sequences
    )
    (batch,) = oracles.micro_batches(dataset, config)
    ids_BS = torch.zeros(8, 64, dtype=torch.uint16)
    ids_BS[: len(batch.ids_BS)] = batch.ids_BS
    return dataclasses.replace(batch, ids_BS=ids_BS)


@pytest.mark.parametrize("segments", [0, 200])
class TestDocumentEdges:
    """Kernels leave positions outside of all segments undefined."""

    def test_cover_all_positions(self, segments, sparse_batch):
        edges = attention.document_edges(sparse_batch, segments)
        assert int(edges[0]) == 0
        assert int(edges[-1]) == sparse_batch.ids_BS.numel()

    def test_hold_segments_no_longer_than_sequences(self, segments, sparse_batch):
        lengths = attention.document_edges(sparse_batch, segments).diff()
        assert int(lengths.min()) >= 0
        assert int(lengths.max()) <= sparse_batch.ids_BS.shape[1]

    def test_have_fixed_number(self, segments, sparse_batch):
        edges = attention.document_edges(sparse_batch, segments)
        documents = len(sparse_batch.starts_N)
        assert len(edges) == max(segments, documents + len(sparse_batch.ids_BS)) + 1

    def test_are_equal_only_at_the_end(self, segments, sparse_batch):
        edges = attention.document_edges(sparse_batch, segments)
        before_end = int((edges < edges[-1]).sum())
        assert edges[: before_end + 1].diff().all()

    def test_include_those_of_all_documents(self, segments, sparse_batch):
        edges = attention.document_edges(sparse_batch, segments)
        starts_N = sparse_batch.starts_N
        ends_N = starts_N + sparse_batch.tokens_N
        assert {*starts_N.tolist(), *ends_N.tolist()} <= set(edges.tolist())


def test_empty_batch_has_no_documents():
    document_BS, _ = document_positions(_empty_batch())
    assert not document_BS.any()


def _empty_batch() -> MicroBatch:
    none = torch.zeros(0, dtype=torch.int32)
    return MicroBatch(
        ids_BS=torch.zeros(2, 8, dtype=torch.uint16),
        starts_N=none,
        tokens_N=none,
        predicted_P=none,
        targets_P=none.to(torch.uint16),
        non_padding_tokens=0,
        predicted_tokens=0,
        most_predicted_in_sequence=0,
        padded_sequences=2,
    )


@pytest.fixture
def aot_eager(monkeypatch):
    """Compile as far as graphs go, their backward included.

    Machine code takes a minute a family.
    """
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


DROPOUT = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


@pytest.mark.parametrize(
    "shape",
    [
        *(oracles.SHAPES[name] for name in oracles.FAMILIES),
        oracles.SHAPES["bert"] | DROPOUT,
    ],
    ids=[*oracles.FAMILIES, "dropout"],
)
@pytest.mark.parametrize("activation_checkpointing", ["selective", "full"])
def test_checkpointing_changes_neither_loss_nor_gradient(
    shape, activation_checkpointing, dataset
):
    config = oracles.config_of(model=ModelSettings(name="m", config=shape))
    checkpointed = config.model_copy(
        update={"activation_checkpointing": activation_checkpointing}
    )
    oracles.check_alike(
        oracles.learned(checkpointed, dataset),
        oracles.learned(config, dataset),
        loss=1e-7,
    )


@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_checkpointing_saves_memory(last_layer, dataset):
    saved_bytes: dict[str, int] = {}
    for activation_checkpointing in ("none", "selective", "full"):
        config = oracles.config_of(
            activation_checkpointing=activation_checkpointing, last_layer=last_layer
        )
        training = oracles.training_of(config, dataset)
        storage_bytes: dict[int, int] = {}

        def pack(tensor, storage_bytes=storage_bytes):
            storage = tensor.untyped_storage()
            storage_bytes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training.module(*oracles.micro_batches(dataset, config))
        saved_bytes[activation_checkpointing] = sum(storage_bytes.values())
        loss.backward()
    # Selective checkpointing keeps tensors in a cache of its own, which these hooks do
    # not see.
    assert saved_bytes["full"] < saved_bytes["none"]
    assert saved_bytes["selective"] < saved_bytes["none"]


@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_rejects_checkpointing_that_model_does_not_support(last_layer, dataset):
    config = oracles.config_of(activation_checkpointing="full", last_layer=last_layer)
    training = oracles.training_of(config, dataset)
    training.module.model.supports_gradient_checkpointing = False
    with pytest.raises(BadConfig, match="no activation checkpointing"):
        checkpoint_activations(training.module.model, config)


def _check_compiled(config, dataset):
    """Assert that compiled layers learn the same, and are compiled once.

    Micro-batches that differ in all but their shape compile no more.
    """
    torch._dynamo.reset()
    compiled = oracles.training_of(config.model_copy(update={"compile": True}), dataset)
    batches = oracles.micro_batches(dataset, config, steps=8)
    # Names differ by nothing: layers are compiled in place.
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
    assert len({batch.predicted_tokens for batch in batches}) > 1
    assert len({len(batch.starts_N) for batch in (batches[0], *batches[3:])}) > 1
    assert counter.recompilations == 0


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
    _choose_varlen(monkeypatch, kind)
    oracles.check_alike(oracles.learned(oracles.config_of(family), dataset), expected)
    _check_compiled(oracles.config_of(family), dataset)


def test_reserves_segments_for_uneven_packing(dataset):
    module = oracles.training_of(oracles.config_of(layout="packed"), dataset).module
    starts_N = torch.cat(
        [
            512 * sequence + torch.arange(7 if sequence % 2 else 1)
            for sequence in range(128)
        ]
    )
    module.expect_documents(
        SimpleNamespace(ids_BS=torch.empty(128, 512), starts_N=starts_N)
    )
    assert module._fixed_segments >= 128 + len(starts_N) + 6 * 3 * 128**0.5


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
