import math

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, AutoTokenizer

from testbed.datasets import write_dataset
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.build import GraphCounter
from trainer.checkpoint.tensors import export_model
from trainer.config.train_config import EvaluationSettings
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig
from trainer.evaluate import evaluate
from trainer.model.attention import VARLEN_NAME


@pytest.fixture
def split(tmp_path) -> TokenDataset:
    samples = [
        [5 + (start + step) % 60 for step in range(10 + start % 30)]
        for start in range(90)
    ]
    return TokenDataset.open(
        write_dataset(tmp_path / "d", samples, vocab_size=128, validation=samples[:50])
    )


def _evaluated(dataset: TokenDataset, **changes):
    config = config_of(**changes)
    training = training_of(config, dataset)
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    return training, evaluate(
        training.module, validation, config, join_ranks(config, environment={}), step=7
    )


def test_every_layout_and_micro_batch_finds_the_same_loss_and_accuracy_in_as_many_rows_as_asked_for(
    split,
):
    _, padded = _evaluated(split, layout="padded")
    assert (padded.rows, padded.step) == (50, 7)
    assert (
        _evaluated(
            split, layout="padded", evaluation=EvaluationSettings(max_sequences=20)
        )[1].rows
        == 20
    )
    for changes in (
        {"layout": "packed"},
        {"layout": "bucketed"},
        {"layout": "padded", "micro_batch_size": 3},
    ):
        _, found = _evaluated(split, **changes)
        assert found.loss == pytest.approx(padded.loss, rel=1e-6)
        assert found.masked_accuracy == pytest.approx(padded.masked_accuracy)
        assert found.predicted_tokens == padded.predicted_tokens


def test_it_is_the_same_again_and_leaves_the_model_in_training_without_gradients(split):
    training, found = _evaluated(split)
    _, again = _evaluated(split)
    assert (again.loss, again.masked_accuracy) == (found.loss, found.masked_accuracy)
    assert training.module.training
    assert all(parameter.grad is None for parameter in training.module.parameters())
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    # As of words that are all as likely.
    assert found.loss == pytest.approx(math.log(128), rel=0.1)


def test_a_compiled_model_is_evaluated_without_compiling_more(split):
    torch._dynamo.reset()
    counter = GraphCounter()
    counter.stepped()
    _, plain = _evaluated(split)
    _, found = _evaluated(split, compile=True)
    assert counter.recompilations == 0
    assert found.loss == pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_no_sample_is_missed_where_lanes_end_one_by_one(micro_batch_size, tmp_path):
    samples = [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(4200)
    ]
    split = TokenDataset.open(
        write_dataset(tmp_path / "d", samples[:8], vocab_size=128, validation=samples)
    )
    few = EvaluationSettings(max_sequences=100_000)
    _, whole = _evaluated(split, evaluation=few, micro_batch_size=64)
    _, found = _evaluated(split, evaluation=few, micro_batch_size=micro_batch_size)
    assert (found.rows, found.predicted_tokens) == (whole.rows, whole.predicted_tokens)


def export_of(training, dataset, directory, *, leads=True):
    export_model(
        training.module,
        dataset_dir=dataset.directory,
        special_ids=dataset.manifest.special_ids,
        seq_length_tokens=64,
        directory=directory,
        leads=leads,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "eurobert"])
def test_an_exported_model_gives_the_same_logits_in_transformers(
    family, precision, dataset, tmp_path
):
    config = config_of(family, precision=precision)
    training = training_of(config, dataset)
    for batch in micro_batches(dataset, config, steps=3):
        training.step.run([batch], 1e-2)
    # As a model trained on a GPU is.
    training.module.model.config._attn_implementation = VARLEN_NAME
    export_of(training, dataset, tmp_path / "model")
    export_of(training, dataset, tmp_path / "other", leads=False)
    # Only the rank that leads writes.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert VARLEN_NAME not in (tmp_path / "model" / "config.json").read_text()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = tokenizer(
        ["w5 w6 w7 [MASK] w9", "w20 w21 [MASK]"], padding=True, return_tensors="pt"
    )
    training.module.model.config._attn_implementation = "sdpa"
    training.module.eval()
    exact = training_of(config_of(family), dataset).module.eval()
    exact.load_state_dict(training.module.state_dict())
    inputs = {name: texts[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = loaded(**inputs).logits
        assert torch.equal(logits, exact.model(**inputs).logits)
        with training.module.autocast("cpu"):
            torch.testing.assert_close(
                training.module.model(**inputs).logits.float(),
                logits,
                rtol=0.05,
                atol=0.05,
            )
    # It learned that each word follows the one before it.
    assert 5 <= int(loaded(**inputs).logits[0, 4].argmax()) < 65


def test_a_disk_that_refuses_the_model_is_told_and_what_killed_and_failed_exports_leave_is_removed(
    dataset, tmp_path, monkeypatch
):
    left, model = tmp_path / "r" / ".model.0a0b0c0d.partial", tmp_path / "r" / "model"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    training = training_of(config_of(), dataset)
    export_of(training, dataset, model)
    assert list(model.parent.iterdir()) == [model]
    before = (model / "model.safetensors").read_bytes()

    def refuse(directory, **_):
        (directory / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training.module.model, "save_pretrained", refuse)
    with pytest.raises(BadConfig, match="No space left on device") as caught:
        export_of(training, dataset, model)
    assert "only exports" in caught.value.next_step
    assert list(model.parent.iterdir()) == [model]
    assert (model / "model.safetensors").read_bytes() == before
