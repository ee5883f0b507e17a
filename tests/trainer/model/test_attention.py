import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from tests.trainer import oracles
from trainer.build import GraphCounter, checkpoint_activations
from trainer.config.train_config import ModelSettings
from trainer.data.dataset import SpecialIds
from trainer.data.loader import MicroBatch
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
    attend = functools.partial(oracles.attend_within_edges, shortest=int(kind == "fa3"))
    monkeypatch.setattr(sparse_last_layer, "varlen_attn", attend)

    def choose(*known):
        return dataclasses.replace(choose_attention(*known), kind=kind)

    monkeypatch.setattr("trainer.build.choose_attention", choose)


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("way", ["sdpa", "varlen"])
def test_a_document_never_influences_another(family, way, dataset, monkeypatch):
    """Each token of one document is changed; the logits of all others stay as they
    were, to the last bit."""
    monkeypatch.setattr(sparse_last_layer, "varlen_attn", oracles.attend_within_edges)
    # Without masks, as the perturbed document is to differ in all its tokens.
    config = oracles.config_of(
        family, mlm_head="dense", micro_batch_size=2, global_batch_size=2
    )
    training = oracles.training_of(config, dataset)
    if way == "varlen":
        training.module.model.config._attn_implementation = attention.VARLEN_NAME
    training.module.attention = dataclasses.replace(training.module.attention, kind=way)
    training.module.eval()
    (batch,) = oracles.micro_batches(dataset, config)
    chosen = len(batch.starts_N) // 2
    start, tokens = int(batch.starts_N[chosen]), int(batch.tokens_N[chosen])
    inside = torch.zeros(batch.ids_BS.numel(), dtype=torch.bool)
    inside[start : start + tokens] = True
    wide = batch.wide_ids_BS()
    changed = torch.where(inside.view_as(wide), (wide + 1) % 120, wide).to(torch.uint16)
    with torch.no_grad():
        before, _ = training.module._predict(batch)
        after, _ = training.module._predict(dataclasses.replace(batch, ids_BS=changed))
    assert torch.equal(before[~inside], after[~inside])
    # And every token of it does influence it.
    assert ((before[inside] - after[inside]).abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded", "bucketed"])
@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_a_loop_over_documents_gives_the_loss_and_gradient_of_whole_rows_under_a_mask(
    family, layout, last_layer, dataset, monkeypatch
):
    config = oracles.config_of(family, layout=layout, last_layer=last_layer)
    under_a_mask = oracles.learned(config, dataset)
    _choose_varlen(monkeypatch)
    oracles.check_alike(oracles.learned(config, dataset), under_a_mask, gradient=1e-5)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_a_whole_step_with_varlen_traces_on_the_meta_device(family, batch):
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


def test_varlen_refuses_what_its_kernel_does_not_do():
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
def test_varlen_is_refused_by_name_and_left_by_auto_where_it_cannot_be_had(
    device, changes, reason
):
    config, model_config = _model_config(attention="varlen", **changes)
    for named in (config, config.model_copy(update={"attention": "fa3"})):
        with pytest.raises(BadConfig, match=reason):
            choose_attention(named, model_config, torch.device(device), Packing())
    auto = config.model_copy(update={"attention": "auto"})
    chosen = choose_attention(auto, model_config, torch.device(device), Packing())
    assert chosen.kind == "sdpa"
    assert reason in chosen.reason


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash_attention_3_is_refused_on_all_but_hoppers(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    config, model_config = _model_config(
        precision="bf16", device="cuda", attention="fa3"
    )
    with pytest.raises(BadConfig, match="requires a Hopper GPU, not another"):
        choose_attention(config, model_config, torch.device("cuda"), Packing())


def test_flash_attention_3_is_active_for_who_asks_for_it_alone(monkeypatch):
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
    monkeypatch.undo()
    with pytest.raises(BadConfig, match="No module named 'flash_attn_interface'"):
        pin_kernels("fa3")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("bert", "packed"), ("bert", "padded"), ("modernbert", "packed")],
)
def test_flash_attention_3_gets_no_empty_segment_and_learns_what_masks_do(
    family, layout, dataset, monkeypatch
):
    """With so few masks that most documents have none."""
    config = oracles.config_of(family, layout=layout, masking_probability=0.02)
    under_a_mask = oracles.training_of(config, dataset)
    _choose_varlen(monkeypatch, "fa3")
    exact = oracles.training_of(config, dataset)
    for number, batch in enumerate(oracles.micro_batches(dataset, config, steps=5)):
        exact.module._slots = 64 if number % 2 else None  # as on GPUs
        more = number % 3  # sequences without documents
        ids_BS, padded = (
            torch.cat([batch.ids_BS, torch.zeros_like(batch.ids_BS[:more])]),
            batch.padded_sequences + more,
        )
        varied = dataclasses.replace(batch, ids_BS=ids_BS, padded_sequences=padded)
        found, expected = (
            oracles.gradients_of(one, [varied]) for one in (exact, under_a_mask)
        )
        oracles.check_alike(found, expected, gradient=1e-5)


def test_an_encoder_that_cannot_be_packed_takes_padded_rows_only():
    config, model_config = _model_config()
    with pytest.raises(BadConfig, match=r"neither packed sequences .*: for a reason"):
        choose_attention(config, model_config, torch.device("cpu"), "for a reason")
    padded = config.model_copy(update={"layout": "padded"})
    chosen = choose_attention(padded, model_config, torch.device("cpu"), "for a reason")
    assert (chosen.kind, chosen.reason) == ("row", "padding mask of bert: for a reason")


def test_a_changed_attention_dropout_is_named_as_a_change_of_recipe(dataset):
    shape = oracles.SHAPES["bert"] | {"attention_probs_dropout_prob": 0.1}
    config = oracles.config_of(
        model=ModelSettings(name="m", config=shape), attention_dropout=0.0
    )
    training = oracles.training_of(config, dataset)
    assert training.recipe_changes == ["attention dropout 0 instead of the model's 0.1"]
    assert training.module.model.config.attention_probs_dropout_prob == 0
    assert (
        oracles.training_of(
            config.model_copy(update={"attention_dropout": None}), dataset
        ).recipe_changes
        == []
    )


@pytest.mark.parametrize("segments", [0, 200])
@pytest.mark.parametrize("rows", [2, 7])
def test_edges_divide_all_places_into_segments_no_longer_than_rows_and_empty_at_the_end_alone(
    rows, segments, dataset
):
    """What kernels are not told of they leave undefined."""
    (batch,) = oracles.micro_batches(
        dataset, oracles.config_of(micro_batch_size=8, global_batch_size=8 - rows)
    )
    ids = torch.zeros(8, 64, dtype=torch.uint16)
    ids[: len(batch.ids_BS)] = batch.ids_BS
    for one in (dataclasses.replace(batch, ids_BS=ids), _nothing()):
        edges = attention.document_edges(one, segments)
        assert (int(edges[0]), int(edges[-1])) == (0, one.ids_BS.numel())
        assert (
            0
            <= int(edges.diff().min())
            <= int(edges.diff().max())
            <= one.ids_BS.shape[1]
        )
        assert len(edges) == max(segments, len(one.starts_N) + len(one.ids_BS)) + 1
        assert edges[: int((edges < edges[-1]).sum()) + 1].diff().all()
        assert {*one.starts_N.tolist(), *(one.starts_N + one.tokens_N).tolist()} <= set(
            edges.tolist()
        )
    assert not document_positions(_nothing())[0].any()


def _nothing() -> MicroBatch:
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
    """Compile as far as graphs go, their backward included, without machine code, which
    takes a minute a family."""
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
def test_computing_activations_again_changes_neither_loss_nor_gradient(
    shape, activation_checkpointing, dataset
):
    model = ModelSettings(name="m", config=shape)
    again = oracles.learned(
        oracles.config_of(
            model=model, activation_checkpointing=activation_checkpointing
        ),
        dataset,
    )
    oracles.check_alike(
        again, oracles.learned(oracles.config_of(model=model), dataset), loss=1e-7
    )


@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_less_is_kept_the_more_is_computed_again(last_layer, dataset):
    kept: dict[str, int] = {}
    for activation_checkpointing in ("none", "selective", "full"):
        config = oracles.config_of(
            activation_checkpointing=activation_checkpointing, last_layer=last_layer
        )
        training = oracles.training_of(config, dataset)
        held: dict[int, int] = {}

        def pack(tensor, held=held):
            held[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes()
            )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = training.module(*oracles.micro_batches(dataset, config))
        kept[activation_checkpointing] = sum(held.values())
        loss.backward()
    # What selective checkpointing keeps it keeps in a cache of its own, which these
    # hooks do not see.
    assert max(kept["full"], kept["selective"]) < kept["none"]
    training.module.model.supports_gradient_checkpointing = False
    with pytest.raises(BadConfig, match="no activation checkpointing"):
        checkpoint_activations(training.module.model, config)


def _check_compiled(config, dataset):
    """What compiled layers learn is the same, and micro-batches that differ in all but
    their shape compile no more."""
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
    assert (
        len({len(batch.starts_N) for batch in batches[3:]} | {len(batches[0].starts_N)})
        > 1
    )
    assert counter.recompilations == 0


@pytest.mark.slow
def test_compiled_layers_compute_the_same_in_machine_code(dataset):
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
def test_compiled_layers_compute_the_same_and_are_compiled_once(
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
def test_compiled_layers_take_any_number_of_documents(
    family, kind, dataset, monkeypatch
):
    expected = oracles.learned(oracles.config_of(family), dataset)
    _choose_varlen(monkeypatch, kind)
    oracles.check_alike(oracles.learned(oracles.config_of(family), dataset), expected)
    _check_compiled(oracles.config_of(family), dataset)


def test_there_is_room_for_the_documents_of_unevenly_packed_sequences(dataset):
    module = oracles.training_of(oracles.config_of(layout="packed"), dataset).module
    starts_N = torch.cat(
        [512 * row + torch.arange(1 + 6 * (row % 2)) for row in range(128)]
    )
    module.expect_documents(
        SimpleNamespace(ids_BS=torch.empty(128, 512), starts_N=starts_N)
    )
    assert module._segments >= 128 + len(starts_N) + 6 * 3 * 128**0.5


def test_a_graph_compiled_after_the_first_steps_is_counted_unless_it_is_none_of_trainings():
    counter = GraphCounter()
    for _ in range(5):
        counter.stepped()
    function = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with counter.paused():
        function(torch.ones(3))
    assert counter.recompilations == 0
    torch.compile(lambda x: x * 3 + 1, backend="eager")(torch.ones(3))
    assert counter.recompilations == 1
