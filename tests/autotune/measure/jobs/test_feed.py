"""Real windows: real loader workers and ranks on a tiny dataset."""

import numpy as np
import pytest

from autotune.core.outcome import Measured
from autotune.core.trial import FeedFigures, Trial
from autotune.measure.jobs.feed import WARM_UP_STEPS
from autotune.measure.machine import ForkServerMachine
from tests.conftest import write_dataset

pytestmark = pytest.mark.system

TINY = {
    "model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
ROWS, ROW_TOKENS = 4, 64


@pytest.fixture(scope="module")
def machine():
    # Threads that wait for others without spinning: ranks and workers share the cores here.
    with pytest.MonkeyPatch.context() as patch, ForkServerMachine() as started:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        started.start()
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Every sample fills a row by itself, so that a micro-batch has as many samples as rows."""
    rng = np.random.default_rng(0)
    samples = rng.integers(5, 500, (4000, ROW_TOKENS - 2)).tolist()
    return write_dataset(tmp_path_factory.mktemp("feed") / "data", samples)


@pytest.fixture
def window(machine, data):
    """Measures a window."""

    def measure(workers: int, **changes) -> FeedFigures:
        config = {
            "model": {"name": "tiny", "config": TINY}, "seq_length_tokens": ROW_TOKENS, "micro_batch_rows": ROWS,
            "data": {"loader_workers": workers, "prefetch_batches": 2}, "device": "cpu",
            "global_batch_rows": 2 * ROWS * changes.get("local_ranks", 1),
        }  # fmt: skip
        measured = {
            "config": config, "cached": False, "round": 0, "window_s": 0.3, "min_steps": 4, "local_ranks": 1,
            "replayed_step_s": None, "sample_delay_s": 0.0, "beside": [], "storage": "",
        }  # fmt: skip
        trial = Trial(job="feed", measured=measured | changes, place={"data_dir": str(data)}, timeout_s=60)
        outcome = machine.run(trial)
        assert isinstance(outcome, Measured), outcome
        return FeedFigures.of(outcome)

    return measure


def test_a_real_step_is_fed_with_and_without_workers_and_from_memory(window):
    alone, two, cached = window(0), window(2), window(0, cached=True)
    for figures in (alone, two, cached):
        assert figures.steps >= 4
        assert figures.optimizer_steps == figures.steps + 2
        assert figures.window_end_s - figures.window_start_s >= 0.3
        assert 0 < figures.real_tokens_per_s <= figures.slot_tokens_per_s
        assert 0 <= figures.data_wait_share <= 1
        assert figures.memory_bytes > 2**26
        assert figures.local_ranks == 1
        assert figures.gpus == ()
    warm_up = WARM_UP_STEPS["cpu"] * 2
    assert {one.micro_batches_per_step for one in (alone, two, cached)} == {2}
    assert alone.discarded_batches == cached.discarded_batches == warm_up
    ready = 2 * 2
    assert warm_up + ready < two.discarded_batches <= warm_up + 2 * ready
    assert (alone.worker_bytes, cached.worker_bytes) == (None, None)
    assert 0 < two.worker_bytes < two.memory_bytes


def test_operations_of_the_model_are_counted_over_all_ranks(window):
    layer = 4 * TINY["hidden_size"] ** 2 + 2 * TINY["hidden_size"] * TINY["intermediate_size"]
    figures = window(0)
    of_a_token = figures.model_flops_per_s / figures.real_tokens_per_s
    # The last layer's keys and values are for every token, the rest and the head for those to predict.
    least, most = 6 * 2 * TINY["hidden_size"] ** 2, 6 * (layer + TINY["hidden_size"] * 2000)
    assert least < of_a_token < most
    both = window(0, local_ranks=2)
    assert both.model_flops_per_s / both.real_tokens_per_s == pytest.approx(of_a_token, rel=0.05)
    assert window(0, replayed_step_s=0.01).model_flops_per_s is None


def test_a_sleeping_dataset_gives_the_rate_that_follows_from_its_workers(window):
    step_s, sample_s = 0.02, 0.015
    batch_s = ROWS * sample_s
    slept = {"replayed_step_s": step_s, "sample_delay_s": sample_s, "window_s": 0.9}

    def reached(workers, expected_s, **more):
        """Whatever else a machine does can only make a window slower, so one of a few that is as expected will do."""
        rate = pytest.approx(ROWS * ROW_TOKENS / expected_s, rel=0.25)
        for _ in range(4):
            figures = window(workers, **slept, **more)
            if figures.slot_tokens_per_s == rate:
                break
        assert figures.slot_tokens_per_s == rate
        return figures

    for workers, expected_s in ((0, batch_s), (2, batch_s / 2), (4, step_s)):
        figures = reached(workers, expected_s)
        assert figures.data_wait_share == pytest.approx(max(0.0, 1 - step_s / expected_s), abs=0.25)
    reached(0, step_s, cached=True)


def test_two_ranks_give_one_figure_of_both(window):
    slept = {"replayed_step_s": 0.05, "window_s": 0.5}
    one, both = window(0, **slept), window(0, **slept, local_ranks=2)
    assert both.local_ranks == 2
    assert both.slot_tokens_per_s == pytest.approx(2 * one.slot_tokens_per_s, rel=0.25)
    assert both.memory_bytes > 1.2 * one.memory_bytes
