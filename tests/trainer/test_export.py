import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.attention import VARLEN_NAME
from trainer.errors import BadConfig
from trainer.export import export_model


def export_of(training, dataset, directory, *, leads=True):
    export_model(
        training.module, dataset_dir=dataset.directory, special_ids=dataset.manifest.special_ids,
        seq_length_tokens=64, directory=directory, leads=leads,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_an_exported_model_gives_the_same_logits_in_transformers(family, dataset, tmp_path):
    config = config_of(family)
    training = training_of(config, dataset)
    for batch in micro_batches(dataset, config, steps=3):
        training.step.run([batch], 1e-2)
    # As a model trained on a GPU is.
    training.model.config._attn_implementation = VARLEN_NAME
    export_of(training, dataset, tmp_path / "model")
    export_of(training, dataset, tmp_path / "other", leads=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # only the rank that leads writes
    assert VARLEN_NAME not in (tmp_path / "model" / "config.json").read_text()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = tokenizer(["w5 w6 w7 [MASK] w9", "w20 w21 [MASK]"], padding=True, return_tensors="pt")
    training.model.config._attn_implementation = "sdpa"
    training.module.eval()
    with torch.no_grad():
        inputs = {name: texts[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(loaded(**inputs).logits, training.model(**inputs).logits)
    # It learned that each word follows the one before it.
    predicted = loaded(**inputs).logits[0, 4].argmax()
    assert 5 <= int(predicted) < 65


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
