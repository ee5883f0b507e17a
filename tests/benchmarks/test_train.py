from dataclasses import replace

import pytest

from benchmarks.rivals import HuggingFace, Ours, Paper
from benchmarks.train import Found, Setting, flop_ratio, make_bars, make_match, recipes
from trainer.formats.train_config import TrainConfig


@pytest.fixture(scope="module")
def match(tmp_path_factory):
    """Return the benchmark's match with a model and a step that take no time."""
    setting = Setting(dropout=0.0, vocab_size=1000, turns=1)
    match = make_match(tmp_path_factory.mktemp("train"), setting, steps=4)
    shape = match.config.model.config | {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    config = match.config.model_dump() | {
        "seq_length_tokens": 64,
        "global_batch_samples": 16,
    }
    config["model"]["config"] = shape
    return replace(match, config=TrainConfig(**config), samples_per_step=16)


@pytest.mark.parametrize(
    "make",
    [Ours, Paper, HuggingFace, *(lambda m, n=n: Ours(recipes(m)[n]) for n in (0, 1))],
)
def test_contenders_train_the_same_samples(make, match):
    contender = make(match)
    # transformers' loader is a batch ahead, which it makes in the first turn.
    turns = [contender.step() for _ in range(4)][1:]
    contender.finish()
    mean = sum(turn.non_padding_tokens for turn in turns) / 3
    assert all(turn.seconds > 0 for turn in turns)
    # 16 samples, most of them cut at 64 tokens.
    assert 16 * 40 < mean < 16 * 64


def test_contenders_error_is_raised(match):
    class Broken(Paper):
        def run(self) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Broken(match).step()


def test_flop_ratio_grows_with_the_vocabulary(tmp_path):
    ratios = [
        flop_ratio(
            make_match(
                tmp_path / str(size),
                Setting(dropout=0.0, vocab_size=size, turns=1),
                steps=1,
            )
        )
        for size in (1000, 22_016)
    ]
    assert 2 < ratios[0] < ratios[1] < 8


def test_bars_are_ratios_of_medians():
    rates = {
        "ours": [9.0, 10.0, 30.0],
        "paper": [2.0, 2.0, 2.0],
        "HF Trainer": [4.0, 4.0, 4.0],
        "paper recipe": [2.5],
        "hf-trainer recipe": [4.6],
    }
    measurements = Found(
        tokens_per_s=rates,
        ceiling=4.0,
        overhead=0.01,
        losses={"ours": 5.0, "HF Trainer": 5.2},
    )
    bars = {bar.name: bar for bar in make_bars(measurements)}
    figures = {name: bar.figure for name, bar in bars.items()}
    assert figures["train_against_paper_ratio"] == 5.0
    assert figures["train_paper_recipe_ratio"] == 1.25
    assert figures["train_hf_recipe_difference_share"] == pytest.approx(0.15)
    assert (
        bars["train_against_hf_trainer_ratio"].holds
        is bars["train_loss_difference_share"].holds
        is False
    )
    assert bars["train_step_overhead_share"].holds
