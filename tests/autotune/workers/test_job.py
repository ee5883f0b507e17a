"""Real windows, with real loader workers and ranks on a tiny dataset; and what takes
micro-batches in them."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.trials.values import Measured, TrainingFigures, Trial
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
ROWS, ROW_TOKENS = 4, 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Every sample fills a row by itself, so that a micro-batch has as many samples as
    rows."""
    rng = np.random.default_rng(0)
    samples = rng.integers(5, 500, (4000, ROW_TOKENS - 2)).tolist()
    return write_dataset(tmp_path_factory.mktemp("training") / "data", samples)


@pytest.fixture
def window(started_server, data):
    """Measures a window."""

    def measure(workers: int, **changes) -> TrainingFigures:
        config = {
            "model": {"name": "tiny", "config": TINY},
            "seq_length_tokens": ROW_TOKENS,
            "micro_batch_size": ROWS,
            "data": {"num_workers": workers, "prefetch_factor": 2},
            "device": "cpu",
            "global_batch_size": 2 * ROWS * changes.get("local_ranks", 1),
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
def test_a_real_step_is_fed_with_and_without_workers_and_from_memory(window):
    alone, two, cached = window(0), window(2), window(0, cached=True)
    for figures in (alone, two, cached):
        assert figures.steps >= 4
        assert figures.optimizer_steps == figures.steps + 2
        assert figures.window_end_s - figures.window_start_s >= 0.3
        assert 0 < figures.tokens_per_s <= figures.padded_tokens_per_s
        assert 0 <= figures.data_wait_share <= 1
        assert figures.memory_bytes > 2**26
        assert figures.local_ranks == 1
        assert figures.gpus == ()
    warm_up = WARM_UP_STEPS["cpu"] * 2
    assert {one.gradient_accumulation_steps for one in (alone, two, cached)} == {2}
    assert alone.discarded_batches == cached.discarded_batches == warm_up
    ready = 2 * 2
    assert warm_up + ready < two.discarded_batches <= warm_up + 2 * ready
    assert (alone.worker_bytes, cached.worker_bytes) == (None, None)
    assert 0 < two.worker_bytes < two.memory_bytes


@pytest.mark.system
def test_operations_of_the_model_are_counted_over_all_ranks(window):
    layer = (
        4 * TINY["hidden_size"] ** 2
        + 2 * TINY["hidden_size"] * TINY["intermediate_size"]
    )
    figures = window(0)
    of_a_token = figures.model_flops_per_s / figures.tokens_per_s
    # The last layer's keys and values are for every token, the rest and the head for
    # those to predict.
    least, most = (
        6 * 2 * TINY["hidden_size"] ** 2,
        6 * (layer + TINY["hidden_size"] * 2000),
    )
    assert least < of_a_token < most
    both = window(0, local_ranks=2)
    assert both.model_flops_per_s / both.tokens_per_s == pytest.approx(
        of_a_token, rel=0.05
    )
    assert window(0, replayed_step_s=0.01).model_flops_per_s is None


@pytest.mark.system
def test_a_sleeping_dataset_gives_the_rate_that_follows_from_its_workers(window):
    step_s, sample_s = 0.02, 0.015
    batch_s = ROWS * sample_s
    slept = {"replayed_step_s": step_s, "sample_delay_s": sample_s, "window_s": 0.9}

    def reached(workers, expected_s, **more):
        """Whatever else a machine does can only make a window slower, so one of a few
        that is as expected will do."""
        rate = pytest.approx(ROWS * ROW_TOKENS / expected_s, rel=0.25)
        for _ in range(4):
            figures = window(workers, **slept, **more)
            if figures.padded_tokens_per_s == rate:
                break
        assert figures.padded_tokens_per_s == rate
        return figures

    for workers, expected_s in ((0, batch_s), (2, batch_s / 2), (4, step_s)):
        figures = reached(workers, expected_s)
        assert figures.data_wait_share == pytest.approx(
            max(0.0, 1 - step_s / expected_s), abs=0.25
        )
    reached(0, step_s, cached=True)


@pytest.mark.system
def test_two_ranks_give_one_figure_of_both(window):
    slept = {"replayed_step_s": 0.05, "window_s": 0.5}
    one, both = window(0, **slept), window(0, **slept, local_ranks=2)
    assert both.local_ranks == 2
    assert both.padded_tokens_per_s == pytest.approx(
        2 * one.padded_tokens_per_s, rel=0.25
    )
    assert both.memory_bytes > 1.2 * one.memory_bytes


STEP_S = 0.12


@pytest.fixture(autouse=True)
def threads():
    """A replayed step takes torch's threads away."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def full_batch() -> SimpleNamespace:
    """As much as a replayed step looks at: a row as wide as it can be."""
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
    while True:
        time.sleep(delay_s)
        yield full_batch()


def seconds_per_step(consumer: ReplayedStep, loader, steps: int = 6) -> float:
    consumer.step(loader)
    consumer.finish()
    consumer.wait.read()
    started_s = time.perf_counter()
    for _ in range(steps):
        consumer.step(loader)
    consumer.finish()
    return (time.perf_counter() - started_s) / steps


def test_a_replayed_step_takes_its_time_lets_threads_run_and_waits_for_no_fast_loader():
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    consumer = replayed(STEP_S)
    assert seconds_per_step(consumer, itertools.repeat(full_batch())) == pytest.approx(
        STEP_S, rel=0.25
    )
    assert consumer.wait.read() < STEP_S
    stop.set()
    ticking.join()
    assert len(ticks) >= 5


@pytest.mark.parametrize(
    ("delay", "fastest", "slowest"), [(0.5, 0.75, 1.35), (2.5, 1.75, 3.25)]
)
def test_a_faster_loader_hides_behind_the_step_and_a_slower_one_sets_the_pace(
    delay, fastest, slowest
):
    consumer = replayed(STEP_S)
    assert (
        fastest * STEP_S
        < seconds_per_step(consumer, delayed(delay * STEP_S))
        < slowest * STEP_S
    )
    # The first batch is waited for before there is a step to hide behind.
    assert (
        consumer.wait.read() < 2 * STEP_S
        if delay < 1
        else consumer.wait.read() >= 6 * STEP_S
    )


def test_a_replayed_step_hands_on_what_the_loader_gave():
    batches = [full_batch(), full_batch()]
    loader, consumer = iter(batches), replayed(0.001)
    assert [consumer.step(loader), consumer.step(loader)] == [
        [batch] for batch in batches
    ]


def test_a_training_step_really_trains_and_refuses_a_loss_that_is_no_number(
    patterned_dataset,
):
    dataset, config = (
        TokenDataset.open(patterned_dataset),
        config_of(micro_batch_size=4),
    )
    built, batches = (
        training_of(config, dataset),
        iter(micro_batches(dataset, config, steps=4)),
    )
    before = [
        parameter.detach().clone() for parameter in built.module.model.parameters()
    ]
    consumer = TrainingStep(built, config, 1, torch.device("cpu"))
    for _ in range(3):
        (batch,) = consumer.step(batches)
        assert batch.non_padding_tokens > 0
    consumer.finish()
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before, built.module.model.parameters(), strict=True)
    )
    assert consumer.wait.read() > 0
    with torch.no_grad():
        for parameter in built.module.model.parameters():
            parameter.fill_(float("nan"))
    consumer.step(batches)
    with pytest.raises(ValueError, match="the loss is nan"):
        consumer.finish()
