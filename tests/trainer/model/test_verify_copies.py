"""Which encoders can compute with working copies of their weights."""

import pytest

from tests.trainer.model.small_models import small_config
from trainer.formats.families import FAMILIES
from trainer.model import probe
from trainer.model.encoder import fresh_model
from trainer.model.verify_copies import verify_working_copies


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_listed_encoder_takes_working_copies(model_type):
    assert verify_working_copies(small_config(model_type)) is None


@pytest.mark.parametrize(
    ("model_type", "reason"),
    # Words of the errors that models raise with working copies. BigBird is not checked,
    # as its attention differs in a small model.
    [("convbert", "KeyError"), ("longformer", "inplace"), ("big_bird", "sparse")],
)
def test_gives_reason_against_working_copies(model_type, reason):
    assert reason in verify_working_copies(small_config(model_type))


@pytest.mark.usefixtures("no_cached_results")
def test_rejects_copies_if_keys_have_another_input(monkeypatch):
    def double_input(_, inputs):
        return (2 * inputs[0],)

    def model_with_keys_of_another_input(*arguments):
        model = fresh_model(*arguments)
        for name, part in model.named_modules():
            if name.endswith("self.key"):
                part.register_forward_pre_hook(double_input)
        return model

    monkeypatch.setattr(probe, "fresh_model", model_with_keys_of_another_input)
    assert "with other inputs" in verify_working_copies(small_config("bert"))
