import pytest
import torch

from tests.trainer.oracles import config_of, gradients_of, micro_batches, relative_distance, training_of
from trainer.dataset import TokenDataset


def _gradients(patterned_dataset, accumulation: int, **changes) -> tuple[float, dict[str, torch.Tensor]]:
    config = config_of(micro_batch_rows=-(-8 // accumulation), **changes)
    dataset = TokenDataset.open(patterned_dataset)
    return gradients_of(training_of(config, dataset), micro_batches(dataset, config))


@pytest.mark.parametrize("accumulation", [2, 3, 8])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_accumulated_gradients_are_those_of_one_large_batch(patterned_dataset, accumulation, layout):
    whole_loss, whole = _gradients(patterned_dataset, 1, layout=layout)
    loss, parts = _gradients(patterned_dataset, accumulation, layout=layout)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert relative_distance(whole, parts) <= 1e-6


def test_the_loss_is_the_mean_cross_entropy_of_the_predicted_tokens(patterned_dataset):
    config = config_of(layout="padded")
    dataset = TokenDataset.open(patterned_dataset)
    training = training_of(config, dataset)
    (batch,) = micro_batches(dataset, config)
    with torch.no_grad():
        expected = training.model(
            input_ids=batch.wide_ids_BS(), attention_mask=batch.attention_BS(), labels=batch.labels_BS()
        ).loss
    result = training.step.run([batch], 1e-3)
    assert float(result.loss) == pytest.approx(float(expected), rel=1e-5)


def test_the_gradient_is_cut_to_its_largest_norm_and_the_norm_before_is_reported(patterned_dataset):
    _, loose = _gradients(patterned_dataset, 1)
    norm = sum(float((gradient.double() ** 2).sum()) for gradient in loose.values()) ** 0.5
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(max_grad_norm=norm / 4)
    training = training_of(config, dataset)
    seen = []
    training.optimizer.register_step_pre_hook(
        lambda *_: seen.append([parameter.grad.clone() for parameter in training.module.parameters()])
    )
    result = training.step.run(micro_batches(dataset, config), 0.0)
    cut = sum(float((gradient.double() ** 2).sum()) for gradient in seen[0]) ** 0.5
    assert float(result.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert cut == pytest.approx(norm / 4, rel=1e-5)


def test_the_norm_of_a_large_gradient_is_exact_to_rounding():
    from trainer.step import gradient_norm

    parameter = torch.nn.Parameter(torch.zeros(20_000, 256))
    parameter.grad = torch.randn(20_000, 256, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    assert float(gradient_norm([parameter])) == pytest.approx(exact, rel=1e-6)


def test_part_of_the_gradient_is_measured_where_there_are_parts_and_somebody_asks(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_rows=2)
    training = training_of(config, dataset)
    batches = micro_batches(dataset, config)
    assert training.step.run(batches, 0.0).partial is None
    partial = training.step.run(batches, 0.0, part_of_it=True).partial
    share = batches[0].predicted_tokens / sum(batch.predicted_tokens for batch in batches)
    assert partial.share == pytest.approx(share)
    _, alone = gradients_of(training, batches[:1])
    square = sum(float((gradient.double() ** 2).sum()) for gradient in alone.values())
    assert float(partial.square) == pytest.approx(square, rel=1e-5)
    assert training.step.run(batches[:1], 0.0, part_of_it=True).partial is None


def test_bf16_computes_about_the_same_loss_and_gradient(patterned_dataset):
    for family in ("bert", "modernbert"):
        dataset = TokenDataset.open(patterned_dataset)
        config = config_of(family)
        loss, gradients = gradients_of(training_of(config, dataset), micro_batches(dataset, config))
        half = training_of(config.model_copy(update={"precision": "bf16"}), dataset)
        half_loss, half_gradients = gradients_of(half, micro_batches(dataset, config))
        assert half_loss == pytest.approx(loss, rel=1e-2)
        assert 1e-5 < relative_distance(gradients, half_gradients) < 0.05
        assert all(parameter.dtype == torch.float32 for parameter in half.module.parameters())
