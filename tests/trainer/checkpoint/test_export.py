"""Export of a trained model for transformers."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.checkpoint.export import export_model
from trainer.data.dataset import TokenDataset
from trainer.formats.errors import BadConfig
from trainer.model.varlen import VARLEN_NAME

FAMILIES = ("bert", "roberta", "modernbert", "eurobert")
WORD_IDS = range(5, 65)
"""Ids of the words that samples of the dataset have, of a vocabulary of 128."""


def _export(training, dataset, directory, *, leads=True) -> None:
    export_model(
        training.module,
        dataset_dir=dataset.directory,
        special_ids=dataset.manifest.special_ids,
        seq_length_tokens=64,
        directory=directory,
        leads=leads,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_only_rank_0_exports_the_model(family, dataset, tmp_path):
    training = training_of(config_of(family), dataset)
    _export(training, dataset, tmp_path / "model")
    _export(training, dataset, tmp_path / "other", leads=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_does_not_name_the_attention_of_training(family, dataset, tmp_path):
    training = training_of(config_of(family), dataset)
    # As in a training on a GPU; transformers alone does not know this attention.
    training.module.model.config._attn_implementation = VARLEN_NAME
    _export(training, dataset, tmp_path / "model")
    assert VARLEN_NAME not in (tmp_path / "model" / "config.json").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model, trained for three steps, and its export as transformers loads it."""

    family: str
    training: Training
    inputs: dict[str, torch.Tensor]
    """Two texts of different lengths, as the exported tokenizer encodes them."""
    logits: torch.Tensor
    """Logits of the exported model for these texts."""


@pytest.fixture(
    scope="module",
    params=itertools.product(FAMILIES, ("fp32", "bf16")),
    ids=" in ".join,
)
def exported(request, patterned_dataset, tmp_path_factory) -> Exported:
    family, precision = request.param
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(family, precision=precision)
    training = training_of(config, dataset)
    for batch in micro_batches(dataset, config, steps=3):
        training.step.run([batch], 1e-2)
    directory = tmp_path_factory.mktemp("exported") / "model"
    _export(training, dataset, directory)
    training.module.eval()
    inputs = _inputs_of(directory)
    with torch.no_grad():
        exported_model = AutoModelForMaskedLM.from_pretrained(directory).eval()
        logits = exported_model(**inputs).logits
    return Exported(family=family, training=training, inputs=inputs, logits=logits)


def _inputs_of(directory: Path) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = tokenizer(
        ["w5 w6 w7 [MASK] w9", "w20 w21 [MASK]"], padding=True, return_tensors="pt"
    )
    return {name: texts[name] for name in ("input_ids", "attention_mask")}


def test_exported_model_has_the_same_logits(exported, dataset):
    # Weights stay in fp32 in a bf16 training, and are exported so.
    model = training_of(config_of(exported.family), dataset).module.eval()
    model.load_state_dict(exported.training.module.state_dict())
    with torch.no_grad():
        expected = model.model(**exported.inputs).logits
    assert torch.equal(exported.logits, expected)


def test_exported_logits_are_near_those_of_training(exported):
    module = exported.training.module
    with torch.no_grad(), module.autocast("cpu"):
        logits = module.model(**exported.inputs).logits
    # A bf16 training rounds after each operation, by up to 2**-9 of the value. The
    # tolerance of 5 % is 26 of these roundings.
    torch.testing.assert_close(logits.float(), exported.logits, rtol=0.05, atol=0.05)


def test_exported_model_predicts_a_word_of_the_dataset(exported):
    position_of_mask = 4  # after [CLS] and three words
    predicted_id = int(exported.logits[0, position_of_mask].argmax())
    assert predicted_id in WORD_IDS


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
