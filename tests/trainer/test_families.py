import pytest
import torch

from trainer.config import ModelSettings
from trainer.dataset import SpecialIds
from trainer.families import FAMILIES
from trainer.model import build_config, build_model, model_layers

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_known_architecture_has_its_parts_where_they_are_said_to_be(model_type):
    shape = {"model_type": model_type, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3,
             "intermediate_size": 64}  # fmt: skip
    settings = ModelSettings(name="m", config=shape)
    config = build_config(settings, vocab_size=100, special_ids=IDS, seq_length_tokens=16)
    model = build_model(config, torch.device("cpu")).eval()
    family = FAMILIES[model_type]
    assert len(model_layers(model)) == 3
    ids = torch.randint(5, 100, (2, 16))
    with torch.no_grad():
        output = getattr(model, family.encoder)(input_ids=ids).last_hidden_state
        for name in family.head:
            output = getattr(model, name)(output)
        assert torch.equal(output, model(input_ids=ids).logits)
