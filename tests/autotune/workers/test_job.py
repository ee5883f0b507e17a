"""Real windows on a tiny dataset, with real DataLoader workers and ranks."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.trials.job_figures import TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from autotune.workers.job import WARM_UP_STEPS, ReplayedStep, TrainingStep
from testbed.datasets import write_dataset
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import Ranks

TINY = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VOCAB_SIZE = 2000
MICRO_BATCH_SIZE = 4
SEQ_LENGTH_TOKENS = 64
MICRO_BATCHES = 2
"""Micro-batches of a step."""
MICRO_BATCH_TOKENS = MICRO_BATCH_SIZE * SEQ_LENGTH_TOKENS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Dataset whose samples fill a sequence each.

    So a micro-batch has as many samples as sequences.
    """
    rng = np.random.default_rng(0)
    samples = rng.integers(5, 500, (4000, SEQ_LENGTH_TOKENS - 2)).tolist()
    return write_dataset(tmp_path_factory.mktemp("training") / "data", samples)


@pytest.fixture
def window(started_server, data):
    """Return a function that measures a window."""

    def measure(workers: int, **changes) -> TrainingFigures:
        ranks = changes.get("local_ranks", 1)
        config = {
            "model": {"name": "tiny", "config": TINY},
            "seq_length_tokens": SEQ_LENGTH_TOKENS,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "data": {"num_workers": workers, "prefetch_factor": 2},
            "device": "cpu",
            "global_batch_size": MICRO_BATCHES * MICRO_BATCH_SIZE * ranks,
        }
        measured = {
            "config": config,
            "cached": False,
            "round": 0,
            "window_s": 0.3,
            "min_steps": 4,
            "local_ranks": 1,
            "replayed_step_s": None,
            "sample_delay_s": 0.0,
            "interleaved_with": [],
            "storage": "",
        }
        trial = Trial(
            job="training",
            measured=measured | changes,
            local={"data_dir": str(data)},
            timeout_s=60,
        )
        outcome = started_server.run(trial)
        assert isinstance(outcome, Measured), outcome
        return TrainingFigures.of(outcome)

    return measure


@pytest.mark.system
def test_window_of_real_steps_has_figures(window):
    without_workers = window(0)
    two_workers = window(2)
    cached = window(0, cached=True)
    warm_up_steps = WARM_UP_STEPS["cpu"]
    for figures in (without_workers, two_workers, cached):
        assert figures.steps >= 4
        assert figures.optimizer_steps == figures.steps + warm_up_steps
        assert figures.window_end_s - figures.window_start_s >= 0.3
        assert 0 < figures.tokens_per_s <= figures.padded_tokens_per_s
        assert 0 <= figures.data_wait_share <= 1
        assert figures.memory_bytes > 2**26
        assert figures.local_ranks == 1
        assert figures.gpus == ()
        assert figures.gradient_accumulation_steps == MICRO_BATCHES
    warm_up_batches = warm_up_steps * MICRO_BATCHES
    assert without_workers.discarded_batches == warm_up_batches
    assert cached.discarded_batches == warm_up_batches
    prefetched = 2 * 2
    discarded = two_workers.discarded_batches - warm_up_batches
    assert prefetched < discarded <= 2 * prefetched
    assert without_workers.worker_bytes is None
    assert cached.worker_bytes is None
    assert 0 < two_workers.worker_bytes < two_workers.memory_bytes


@pytest.mark.system
def test_counts_model_flops_of_all_ranks(window):
    attention_weights = 4 * TINY["hidden_size"] ** 2
    mlp_weights = 2 * TINY["hidden_size"] * TINY["intermediate_size"]
    head_weights = TINY["hidden_size"] * VOCAB_SIZE
    one_rank = window(0)
    flops_per_token = one_rank.model_flops_per_s / one_rank.tokens_per_s
    # The last layer's keys and values are for every token, the rest and the head for
    # those to predict.
    least_flops = 6 * 2 * TINY["hidden_size"] ** 2
    most_flops = 6 * (attention_weights + mlp_weights + head_weights)
    assert least_flops < flops_per_token < most_flops
    two_ranks = window(0, local_ranks=2)
    assert two_ranks.model_flops_per_s / two_ranks.tokens_per_s == pytest.approx(
        flops_per_token, rel=0.05
    )
    assert window(0, replayed_step_s=0.01).model_flops_per_s is None


@pytest.mark.system
def test_rate_of_a_slow_dataset_follows_from_workers(window):
    step_s = 0.02
    sample_delay_s = 0.015
    batch_s = MICRO_BATCH_SIZE * sample_delay_s

    def reach(workers, expected_s, **changes):
        """Return a window with the expected rate.

        Whatever else a machine does can only make a window slower, so one of a few that
        is as expected will do.
        """
        rate = pytest.approx(MICRO_BATCH_TOKENS / expected_s, rel=0.25)
        for _ in range(4):
            figures = window(
                workers,
                replayed_step_s=step_s,
                sample_delay_s=sample_delay_s,
                window_s=0.9,
                **changes,
            )
            if figures.padded_tokens_per_s == rate:
                break
        assert figures.padded_tokens_per_s == rate
        return figures

    for workers, expected_s in ((0, batch_s), (2, batch_s / 2), (4, step_s)):
        figures = reach(workers, expected_s)
        wait_share = max(0.0, 1 - step_s / expected_s)
        assert figures.data_wait_share == pytest.approx(wait_share, abs=0.25)
    reach(0, step_s, cached=True)


@pytest.mark.system
def test_figures_of_two_ranks_are_summed(window):
    one_rank = window(0, replayed_step_s=0.05, window_s=0.5)
    two_ranks = window(0, replayed_step_s=0.05, window_s=0.5, local_ranks=2)
    assert two_ranks.local_ranks == 2
    assert two_ranks.padded_tokens_per_s == pytest.approx(
        2 * one_rank.padded_tokens_per_s, rel=0.25
    )
    assert two_ranks.memory_bytes > 1.2 * one_rank.memory_bytes


STEP_S = 0.12
STEPS = 6


@pytest.fixture(autouse=True)
def threads():
    """Restore torch's threads, which a replayed step takes away."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def full_batch() -> SimpleNamespace:
    """Return what a replayed step reads of a batch: one full sequence."""
    return SimpleNamespace(ids_BS=torch.zeros(1, 8))


def replayed(step_s: float) -> ReplayedStep:
    alone = Ranks(
        rank=0,
        local_rank=0,
        local_world_size=1,
        world_size=1,
        device=torch.device("cpu"),
    )
    return ReplayedStep(step_s, lambda batch: batch.ids_BS.shape[1] / 8, 1, alone)


def delayed(delay_s: float):
    """Yield a batch after each delay."""
    while True:
        time.sleep(delay_s)
        yield full_batch()


def seconds_per_step(consumer: ReplayedStep, loader) -> float:
    consumer.step(loader)
    consumer.finish()
    consumer.wait.take_waited_s()
    started_s = time.perf_counter()
    for _ in range(STEPS):
        consumer.step(loader)
    consumer.finish()
    return (time.perf_counter() - started_s) / STEPS


def test_replayed_step_takes_its_time():
    consumer = replayed(STEP_S)
    cached = itertools.repeat(full_batch())
    assert seconds_per_step(consumer, cached) == pytest.approx(STEP_S, rel=0.25)
    assert consumer.wait.take_waited_s() < STEP_S


def test_replayed_step_lets_threads_run():
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    seconds_per_step(replayed(STEP_S), itertools.repeat(full_batch()))
    stop.set()
    ticking.join()
    assert len(ticks) >= 5


def test_fast_loader_hides_behind_the_step():
    consumer = replayed(STEP_S)
    step_s = seconds_per_step(consumer, delayed(0.5 * STEP_S))
    assert 0.75 * STEP_S < step_s < 1.35 * STEP_S
    # The first batch is waited for before there is a step to hide behind.
    assert consumer.wait.take_waited_s() < 2 * STEP_S


def test_slow_loader_sets_the_pace():
    consumer = replayed(STEP_S)
    step_s = seconds_per_step(consumer, delayed(2.5 * STEP_S))
    assert 1.75 * STEP_S < step_s < 3.25 * STEP_S
    assert consumer.wait.take_waited_s() >= STEPS * STEP_S


def test_replayed_step_returns_its_batches():
    first, second = full_batch(), full_batch()
    loader = iter([first, second])
    consumer = replayed(0.001)
    assert consumer.step(loader) == [first]
    assert consumer.step(loader) == [second]


@pytest.fixture
def training_step(patterned_dataset):
    """Return a training step, its model and its micro-batches."""
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_size=4)
    training = training_of(config, dataset)
    consumer = TrainingStep(training, config, 1, torch.device("cpu"))
    batches = iter(micro_batches(dataset, config, steps=4))
    return consumer, training.module.model, batches


def test_training_step_changes_the_model(training_step):
    consumer, model, batches = training_step
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        (batch,) = consumer.step(batches)
        assert batch.non_padding_tokens > 0
    consumer.finish()
    after = model.parameters()
    assert any(
        not torch.equal(old, new) for old, new in zip(before, after, strict=True)
    )
    assert consumer.wait.take_waited_s() > 0


def test_training_step_rejects_a_loss_of_nan(training_step):
    consumer, model, batches = training_step
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    consumer.step(batches)
    with pytest.raises(ValueError, match="the loss is nan"):
        consumer.finish()
