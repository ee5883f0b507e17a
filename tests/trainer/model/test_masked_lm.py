"""Loss and gradient of the masked LM, with every layout, head and last layer."""

import pytest
import torch
from torch.nn import functional

from tests.trainer.gradients import (
    assert_gradients_agree,
    loss_and_gradients,
    loss_and_gradients_of_first_step,
)
from tests.trainer.tiny_models import FAMILIES, config_of, micro_batches, training_of
from trainer.data import micro_batch_source
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import micro_batch_plans
from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch_source import MicroBatchSource


def _losses_by_token(
    dataset: TokenDataset, family: str, layout: str
) -> dict[tuple[int, int], float]:
    """Return the loss of every predicted token of the first epoch.

    The key is the token's sample and its position in the sample, which no layout
    changes, so that layouts can be compared token by token.

    Shapes: N documents of a micro-batch, P tokens to predict, K slots of the head, V
    ids.
    """
    config = config_of(
        family, layout=layout, micro_batch_size=50, global_batch_size=50, max_epochs=1
    )
    module = training_of(config, dataset).module
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    losses_by_token: dict[tuple[int, int], float] = {}
    # The epoch ends before ten steps of any layout.
    for micro_batch_plan in micro_batch_plans(dataset, config, plan, rank=0, steps=10):
        batch = source.__getitems__(micro_batch_plan)
        with torch.no_grad():
            logits_KV, labels_K = module._predict(batch)
        losses_K = functional.cross_entropy(logits_KV, labels_K, reduction="none")
        losses_P = losses_K[labels_K != IGNORED_LABEL]
        # A token is in the last document that starts at its position or before.
        starts_until_P = torch.searchsorted(
            batch.starts_N, batch.predicted_P, right=True
        )
        document_P = starts_until_P - 1
        position_P = batch.predicted_P - batch.starts_N[document_P]
        sample_P = micro_batch_plan.segments.samples[document_P.numpy()]
        for sample, position, loss in zip(
            sample_P.tolist(), position_P.tolist(), losses_P.tolist(), strict=True
        ):
            losses_by_token[sample, position] = loss
    return losses_by_token


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_gives_each_token_the_same_loss(family, dataset):
    padded = _losses_by_token(dataset, family, "padded")
    # Most of the 400 samples have a token to predict.
    assert len({sample for sample, _ in padded}) > 350
    for layout in ("packed", "bucketed"):
        losses = _losses_by_token(dataset, family, layout)
        assert losses.keys() == padded.keys()
        for token, loss in losses.items():
            # Losses are about 5, where neighbouring fp32 numbers differ by 5e-7.
            assert abs(loss - padded[token]) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("last_layer", ["dense", "sparse"])
def test_sparse_head_has_gradient_of_dense_head(family, layout, last_layer, dataset):
    dense_config = config_of(
        family, layout=layout, mlm_head="dense", last_layer="dense"
    )
    config = config_of(family, layout=layout, mlm_head="sparse", last_layer=last_layer)
    training = training_of(config, dataset)
    assert training.module.has_sparse_last_layer == (last_layer == "sparse")
    batches = micro_batches(dataset, config)
    assert_gradients_agree(
        loss_and_gradients(training, batches),
        loss_and_gradients_of_first_step(dense_config, dataset),
    )


@pytest.mark.parametrize(
    ("slots", "sequence_slots", "is_enough"),
    [
        pytest.param(192, 64, True, id="enough slots"),
        pytest.param(16, 4, False, id="too few slots"),
    ],
)
def test_head_with_fixed_slots_drops_no_token(
    slots, sequence_slots, is_enough, dataset, monkeypatch
):
    config = config_of()
    training = training_of(config, dataset)
    # Only a compiled module, or one on a GPU, fixes its slots itself.
    sizes = training.module.fixed_sizes
    sizes.slots = slots
    sizes.sequence_slots = sequence_slots
    monkeypatch.setattr(micro_batch_source, "fixed_slots", lambda _: slots)
    (batch,) = micro_batches(dataset, config)
    assert len(batch.slot_position_K) % slots == 0
    assert (batch.predicted_tokens <= slots) == is_enough
    assert (batch.most_predicted_in_sequence <= sequence_slots) == is_enough
    assert_gradients_agree(
        loss_and_gradients(training, [batch]),
        loss_and_gradients_of_first_step(config, dataset),
    )
    # Sequence slots are not counted.
    assert sizes.overflows == (0 if is_enough else 1)


def test_micro_batch_without_predicted_tokens_has_no_gradient(dataset):
    config = config_of(masking_probability=1e-6)
    (batch,) = micro_batches(dataset, config)
    assert batch.predicted_tokens == 0
    loss, gradients = loss_and_gradients_of_first_step(config, dataset)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("family", ["bert", "electra"])
class TestAgainstTransformers:
    """transformers computes the expected loss of all labels, with the dense head."""

    @pytest.fixture
    def training(self, family, dataset):
        return training_of(config_of(family, layout="padded"), dataset)

    @pytest.fixture
    def batch(self, family, dataset):
        config = config_of(family, layout="padded")
        (batch,) = micro_batches(dataset, config)
        return batch

    @pytest.fixture
    def expected(self, training, batch):
        with torch.no_grad():
            return training.module.model(
                input_ids=batch.wide_ids_BS(),
                attention_mask=batch.attention_BS(),
                labels=batch.labels_BS(),
            )

    def test_evaluation_matches_transformers(self, training, batch, expected):
        labels_BS = batch.labels_BS()
        is_hit_BS = expected.logits.argmax(-1) == labels_BS
        expected_hits = int(is_hit_BS[labels_BS != IGNORED_LABEL].sum())
        with torch.no_grad():
            loss_sum, hits = training.module.evaluate(batch)
        mean_loss = float(loss_sum / batch.predicted_tokens)
        assert mean_loss == pytest.approx(float(expected.loss), rel=1e-5)
        assert int(hits) == expected_hits

    def test_step_loss_matches_transformers(self, training, batch, expected):
        loss = float(training.step.run([batch], lr=1e-3).loss)
        assert loss == pytest.approx(float(expected.loss), rel=1e-5)
