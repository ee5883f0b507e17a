import math

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, AutoTokenizer

from testbed.datasets import write_dataset
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.checkpoint.export import export_model
from trainer.compilation import GraphCounter
from trainer.config.train_config import EvaluationSettings
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig
from trainer.evaluate import evaluate
from trainer.model.varlen import VARLEN_NAME


def ascending_samples(count, shortest, lengths):
    """Samples in which each token is one above the one before it."""
    return [
        [5 + (start + step) % 60 for step in range(shortest + start % lengths)]
        for start in range(count)
    ]


@pytest.fixture
def dataset_with_validation(tmp_path) -> TokenDataset:
    samples = ascending_samples(90, shortest=10, lengths=30)
    directory = write_dataset(
        tmp_path / "d", samples, vocab_size=128, validation=samples[:50]
    )
    return TokenDataset.open(directory)


def _evaluate(dataset: TokenDataset, **changes):
    config = config_of(**changes)
    training = training_of(config, dataset)
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    ranks = join_ranks(config, environment={})
    return training, evaluate(training.module, validation, config, ranks, step=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "packed"},
        {"layout": "bucketed"},
        {"layout": "padded", "micro_batch_size": 3},
    ],
    ids=["packed", "bucketed", "small micro-batches"],
)
def test_loss_is_independent_of_layout(dataset_with_validation, changes):
    _, padded = _evaluate(dataset_with_validation, layout="padded")
    assert (padded.rows, padded.step) == (50, 7)
    _, other = _evaluate(dataset_with_validation, **changes)
    assert other.loss == pytest.approx(padded.loss, rel=1e-6)
    assert other.masked_accuracy == pytest.approx(padded.masked_accuracy)
    assert other.predicted_tokens == padded.predicted_tokens


def test_evaluates_at_most_max_sequences(dataset_with_validation):
    _, row = _evaluate(
        dataset_with_validation,
        layout="padded",
        evaluation=EvaluationSettings(max_sequences=20),
    )
    assert row.rows == 20


def test_evaluation_is_repeatable(dataset_with_validation):
    _, row = _evaluate(dataset_with_validation)
    _, again = _evaluate(dataset_with_validation)
    assert (again.loss, again.masked_accuracy) == (row.loss, row.masked_accuracy)


def test_untrained_model_predicts_all_tokens_alike(dataset_with_validation):
    _, row = _evaluate(dataset_with_validation)
    assert row.perplexity == pytest.approx(math.exp(row.loss))
    # All tokens are equally likely.
    assert row.loss == pytest.approx(math.log(128), rel=0.1)


def test_evaluation_leaves_the_model_in_training_mode(dataset_with_validation):
    training, _ = _evaluate(dataset_with_validation)
    assert training.module.training
    assert all(parameter.grad is None for parameter in training.module.parameters())


def test_evaluation_of_a_compiled_model_compiles_nothing(dataset_with_validation):
    torch._dynamo.reset()
    counter = GraphCounter()
    counter.stepped()
    _, eager = _evaluate(dataset_with_validation)
    _, compiled = _evaluate(dataset_with_validation, compile=True)
    assert counter.recompilations == 0
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_misses_no_sample_at_the_end_of_lanes(micro_batch_size, tmp_path):
    samples = ascending_samples(4200, shortest=4, lengths=50)
    dataset = TokenDataset.open(
        write_dataset(tmp_path / "d", samples[:8], vocab_size=128, validation=samples)
    )
    all_sequences = EvaluationSettings(max_sequences=100_000)
    _, expected = _evaluate(dataset, evaluation=all_sequences, micro_batch_size=64)
    _, row = _evaluate(
        dataset, evaluation=all_sequences, micro_batch_size=micro_batch_size
    )
    assert row.rows == expected.rows
    assert row.predicted_tokens == expected.predicted_tokens


def _export(training, dataset, directory, *, leads=True):
    export_model(
        training.module,
        dataset_dir=dataset.directory,
        special_ids=dataset.manifest.special_ids,
        seq_length_tokens=64,
        directory=directory,
        leads=leads,
    )


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "eurobert"])
def test_only_rank_0_exports_the_model(family, dataset, tmp_path):
    training = training_of(config_of(family), dataset)
    _export(training, dataset, tmp_path / "model")
    _export(training, dataset, tmp_path / "other", leads=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "eurobert"])
def test_exported_model_has_the_same_logits(family, precision, dataset, tmp_path):
    config = config_of(family, precision=precision)
    training = training_of(config, dataset)
    for batch in micro_batches(dataset, config, steps=3):
        training.step.run([batch], 1e-2)
    # As a model trained on a GPU is.
    training.module.model.config._attn_implementation = VARLEN_NAME
    _export(training, dataset, tmp_path / "model")
    assert VARLEN_NAME not in (tmp_path / "model" / "config.json").read_text()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = tokenizer(
        ["w5 w6 w7 [MASK] w9", "w20 w21 [MASK]"], padding=True, return_tensors="pt"
    )
    inputs = {name: texts[name] for name in ("input_ids", "attention_mask")}
    training.module.model.config._attn_implementation = "sdpa"
    training.module.eval()
    exact = training_of(config_of(family), dataset).module.eval()
    exact.load_state_dict(training.module.state_dict())
    with torch.no_grad():
        logits = loaded(**inputs).logits
        assert torch.equal(logits, exact.model(**inputs).logits)
        with training.module.autocast("cpu"):
            trained_logits = training.module.model(**inputs).logits
    torch.testing.assert_close(trained_logits.float(), logits, rtol=0.05, atol=0.05)
    # It learned that each word follows the one before it.
    assert 5 <= int(logits[0, 4].argmax()) < 65


def test_export_removes_what_a_killed_export_left(dataset, tmp_path):
    model = tmp_path / "r" / "model"
    partial = tmp_path / "r" / ".model.0a0b0c0d.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    _export(training_of(config_of(), dataset), dataset, model)
    assert list(model.parent.iterdir()) == [model]


def test_failed_export_keeps_the_earlier_model(dataset, tmp_path, monkeypatch):
    model = tmp_path / "r" / "model"
    model.parent.mkdir()
    training = training_of(config_of(), dataset)
    _export(training, dataset, model)
    before = (model / "model.safetensors").read_bytes()

    def fill_the_disk(directory, **_):
        (directory / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training.module.model, "save_pretrained", fill_the_disk)
    with pytest.raises(BadConfig, match="No space left on device") as raised:
        _export(training, dataset, model)
    assert "only exports" in raised.value.next_step
    assert list(model.parent.iterdir()) == [model]
    assert (model / "model.safetensors").read_bytes() == before
