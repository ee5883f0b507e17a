"""The recipe of the paper's public trainer computes what it is said to."""

import pytest
import torch

from autotune.subjects.mlm.jobs.paper_model import RecipeModel, RecipeStep

SHAPE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
VOCABULARY, WIDTH, FIRST_WORD = 40, 8, 5


@pytest.fixture
def model():
    torch.manual_seed(0)
    return RecipeModel(SHAPE, VOCABULARY, WIDTH, FIRST_WORD)


def batch_of(ids_BS):
    allowed_BS = (ids_BS != 0).long()
    labels_BS = torch.where(allowed_BS.bool(), ids_BS, -100)
    return {"input_ids": ids_BS, "attention_mask": allowed_BS, "labels": labels_BS}


IDS_BS = torch.tensor([[2, 5, 8, 6, 7, 12, 3, 0], [2, 8, 12, 3, 0, 0, 0, 0]])
"""8 and 12 end an instruction; 0 is padding."""


def test_positions_begin_again_in_each_instruction(model):
    instruction_BS, argument_BS = model.embedding.positions(IDS_BS)
    assert instruction_BS.tolist() == [
        [0, 0, 0, 1, 1, 1, 2, 2],
        [0, 0, 1, 2, 2, 2, 2, 2],
    ]
    assert argument_BS.tolist() == [
        [0, 1, 2, 0, 1, 2, 0, 1],
        [0, 1, 0, 0, 1, 2, 3, 4],
    ]


def test_padding_is_not_attended(model):
    model.eval()
    allowed_BS = IDS_BS != 0
    logits_BSV = model(IDS_BS, allowed_BS)
    assert logits_BSV.shape == (2, WIDTH, VOCABULARY)
    changed_BS = IDS_BS.clone()
    changed_BS[1, 5] = 9  # padding
    # Each row in its own call, as a matmul's shape may change its rounding.
    torch.testing.assert_close(
        model(changed_BS, allowed_BS)[1, :4], logits_BSV[1, :4], rtol=1e-5, atol=1e-6
    )


def test_decoder_has_weights_that_learn(model):
    words, decoder = model.embedding.words.weight, model.head[-1].weight
    before = decoder.detach().clone()
    step = RecipeStep(model, torch.device("cpu"))
    for _ in range(30):
        step.run(batch_of(IDS_BS))
    assert words is not decoder
    assert not torch.equal(decoder, before)
    losses = step.logged[::2]
    assert losses[-1] < losses[0]
