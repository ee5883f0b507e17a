import pytest
import torch
from torch.nn import functional

from tests.trainer.oracles import FAMILIES, check_alike, config_of, gradients_of, learned, micro_batches, training_of
from trainer.batch import make_plan
from trainer.dataset import TokenDataset
from trainer.feed import MicroBatchSource, micro_batch_plans
from trainer.masking import IGNORED_LABEL, head_slots


def _losses_by_token(dataset: TokenDataset, family: str, layout: str) -> dict[tuple[int, int], float]:
    """The loss of every predicted token of the first epoch, by its sample and its place there."""
    config = config_of(family, layout=layout, micro_batch_rows=50, global_batch_rows=50, max_epochs=1)
    module = training_of(config, dataset).module
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    found: dict[tuple[int, int], float] = {}
    for one in micro_batch_plans(dataset, config, plan, 0, steps=10):
        batch = source.__getitems__(one)
        with torch.no_grad():
            logits_KV, labels_K = module._predict(batch)
        losses = functional.cross_entropy(logits_KV, labels_K, reduction="none")[: batch.predicted_tokens]
        number = torch.searchsorted(batch.starts_N, batch.predicted_P, right=True) - 1
        places = (batch.predicted_P - batch.starts_N[number]).tolist()
        samples = one.segments.samples[number.numpy()].tolist()
        found |= dict(zip(zip(samples, places, strict=True), losses.tolist(), strict=True))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_bucketed_rows_give_each_token_the_loss_of_padded_rows(family, dataset):
    padded = _losses_by_token(dataset, family, "padded")
    assert len({sample for sample, _ in padded}) > 350
    for layout in ("packed", "bucketed"):
        found = _losses_by_token(dataset, family, layout)
        assert found.keys() == padded.keys()
        assert max(abs(found[token] - padded[token]) for token in padded) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_head_on_the_places_to_predict_has_the_loss_and_gradient_of_one_on_all(family, layout, dataset):
    whole = learned(config_of(family, layout=layout, head="dense", last_layer="all"), dataset)
    for last_layer in ("all", "predicted"):
        config = config_of(family, layout=layout, head="masked", last_layer=last_layer)
        training = training_of(config, dataset)
        assert training.module.narrow == (last_layer == "predicted")
        check_alike(gradients_of(training, micro_batches(dataset, config)), whole)


@pytest.mark.parametrize(("slots", "row_slots", "overflows"), [(192, 64, 0), (16, 4, 1)])
def test_a_head_of_fixed_slots_drops_nothing_and_counts_micro_batches_that_need_more(
    slots, row_slots, overflows, dataset
):
    fixed = training_of(config_of(), dataset)
    fixed.module._slots, fixed.module._row_slots = slots, row_slots
    batches = micro_batches(dataset, config_of())
    assert 16 < batches[0].predicted_tokens <= 192
    check_alike(gradients_of(fixed, batches), learned(config_of(), dataset))
    assert fixed.module.overflows == overflows


@pytest.mark.parametrize(("places", "probability"), [(64, 0.15), (4096, 0.15), (94_208, 0.3), (64, 0.99)])
def test_head_slots_are_whole_tiles_six_sigmas_above_the_mean_and_never_more_than_places(places, probability):
    slots = head_slots(places, probability)
    assert slots % 64 == 0
    mean, sigma = places * probability, (places * probability * (1 - probability)) ** 0.5
    assert min(places, mean + 6 * sigma) <= slots <= max(64, min(places, mean + 6 * sigma + 64))


def test_a_micro_batch_with_nothing_to_predict_weighs_nothing(dataset):
    config = config_of(masking_probability=1e-6)
    assert micro_batches(dataset, config)[0].predicted_tokens == 0
    loss, gradients = learned(config, dataset)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_hits_and_loss_of_training_and_evaluation_are_those_of_the_library(family, dataset):
    config = config_of(family, layout="padded")
    training = training_of(config, dataset)
    (batch,) = micro_batches(dataset, config)
    labels = batch.labels_BS()
    with torch.no_grad():
        expected = training.model(input_ids=batch.wide_ids_BS(), attention_mask=batch.attention_BS(), labels=labels)
        loss, hits = training.module.evaluate(batch)
    assert int(hits) == int((expected.logits.argmax(-1) == labels)[labels != IGNORED_LABEL].sum())
    for one in (loss / batch.predicted_tokens, training.step.run([batch], 1e-3).loss):
        assert float(one) == pytest.approx(float(expected.loss), rel=1e-5)
