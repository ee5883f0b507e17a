import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ModelSettings, TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.feed import MicroBatch, MicroBatchSource, micro_batch_plans
from trainer.loop import make_model, make_plan
from trainer.parallel import join_ranks
from trainer.step import TrainStep, learning_rate, make_optimizer

SHAPE = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _config(**changes) -> TrainConfig:
    settings = {
        "model": ModelSettings(name="m", config=SHAPE),
        "seq_length_tokens": 32,
        "micro_batch_rows": 8,
        "global_batch_rows": 8,
        "max_grad_norm": 1e9,
    }
    return TrainConfig(**settings | changes)


def _one_step(dataset: TokenDataset, config: TrainConfig) -> list[MicroBatch]:
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    return [source.__getitems__(micro_plan) for micro_plan in micro_batch_plans(dataset, config, plan, 0, steps=1)]


def _gradients(patterned_dataset, accumulation: int) -> tuple[float, dict[str, torch.Tensor]]:
    config = _config(micro_batch_rows=-(-8 // accumulation))
    dataset = TokenDataset.open(patterned_dataset)
    ranks = join_ranks(config, environment={})
    model, _ = make_model(config, dataset, ranks)
    optimizer = make_optimizer(model, config)
    seen: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    )
    result = TrainStep(model, optimizer, config, ranks).run(_one_step(dataset, config), 1e-3)
    return float(result.loss_share), seen


@pytest.mark.parametrize("accumulation", [2, 3, 8])
def test_accumulated_gradients_are_those_of_one_large_batch(patterned_dataset, accumulation):
    whole_loss, whole = _gradients(patterned_dataset, 1)
    loss, parts = _gradients(patterned_dataset, accumulation)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    difference = torch.sqrt(sum(((whole[name] - parts[name]) ** 2).sum() for name in whole))
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in whole.values()))
    assert float(difference / norm) < 1e-6


def test_the_loss_is_the_mean_cross_entropy_of_the_predicted_tokens(patterned_dataset):
    config = _config()
    dataset = TokenDataset.open(patterned_dataset)
    ranks = join_ranks(config, environment={})
    model, _ = make_model(config, dataset, ranks)
    (batch,) = _one_step(dataset, config)
    with torch.no_grad():
        expected = model(
            input_ids=batch.wide_ids_BS(), attention_mask=batch.attention_BS(), labels=batch.labels_BS()
        ).loss
    result = TrainStep(model, make_optimizer(model, config), config, ranks).run([batch], 1e-3)
    assert float(result.loss_share) == pytest.approx(float(expected), rel=1e-5)


def test_packed_rows_are_refused_as_attention_would_cross_samples(patterned_dataset):
    config = _config(layout="packed")
    model, _ = make_model(config, TokenDataset.open(patterned_dataset), join_ranks(config, environment={}))
    with pytest.raises(BadConfig, match="attend across"):
        TrainStep(model, make_optimizer(model, config), config, join_ranks(config, environment={}))


def test_bucketed_and_padded_rows_give_the_same_gradient(patterned_dataset):
    def gradient(layout: str) -> torch.Tensor:
        config = _config(layout=layout, micro_batch_rows=2, global_batch_rows=8, seq_length_tokens=128)
        dataset = TokenDataset.open(patterned_dataset)
        ranks = join_ranks(config, environment={})
        model, _ = make_model(config, dataset, ranks)
        optimizer = make_optimizer(model, config)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(model.get_input_embeddings().weight.grad.clone()))
        TrainStep(model, optimizer, config, ranks).run(_one_step(dataset, config), 1e-3)
        return seen[0]

    padded, bucketed = gradient("padded"), gradient("bucketed")
    assert float((padded - bucketed).norm() / padded.norm()) < 1e-5


def test_weight_decay_falls_on_matrices_only(patterned_dataset):
    config = _config()
    model, _ = make_model(config, TokenDataset.open(patterned_dataset), join_ranks(config, environment={}))
    decayed, plain = make_optimizer(model, config).param_groups
    assert decayed["weight_decay"] == config.weight_decay
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert plain["weight_decay"] == 0
    assert all(parameter.ndim < 2 for parameter in plain["params"])


@given(warmup=st.integers(0, 50), steps=st.integers(1, 200))
def test_the_learning_rate_rises_to_its_peak_and_falls_without_leaving_bounds(warmup, steps):
    config = _config(warmup_steps=warmup, max_steps=steps, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    up, down = rates[:warmup], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert warmup >= steps or max(rates) == 1.0
