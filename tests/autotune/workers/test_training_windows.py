"""Real windows on a tiny dataset, with real DataLoader workers and ranks."""

import numpy as np
import pytest

from autotune.trials.job_figures import TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from autotune.workers.jobs.training import WARM_UP_STEPS
from testbed.datasets import write_dataset

TINY = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VOCAB_SIZE = 512
MICRO_BATCH_SIZE = 4
SEQ_LENGTH_TOKENS = 64
MICRO_BATCHES = 2
"""Micro-batches of a step."""
MICRO_BATCH_TOKENS = MICRO_BATCH_SIZE * SEQ_LENGTH_TOKENS
PREFETCH_FACTOR = 2
WINDOW_S = 0.3
MIN_STEPS = 4
WARM_UP_BATCHES = WARM_UP_STEPS["cpu"] * MICRO_BATCHES
REPLAYED_STEP_S = 0.02
"""Time of a replayed micro-batch."""
SAMPLE_DELAY_S = 0.015
BATCH_S = MICRO_BATCH_SIZE * SAMPLE_DELAY_S
"""Time in which one worker reads a micro-batch."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the directory of a dataset whose samples fill a sequence each.

    So a micro-batch has as many samples as sequences.
    """
    rng = np.random.default_rng(0)
    # Two special tokens are added to each; the first five ids are special.
    samples = rng.integers(5, VOCAB_SIZE, (4000, SEQ_LENGTH_TOKENS - 2)).tolist()
    directory = tmp_path_factory.mktemp("training") / "data"
    return write_dataset(directory, samples, vocab_size=VOCAB_SIZE)


@pytest.fixture
def window(started_server, data):
    """Return a function that measures a window on one rank, or as the changes say."""

    def measure(workers: int, **changes) -> TrainingFigures:
        ranks = changes.get("local_ranks", 1)
        config = {
            "model": {"name": "tiny", "config": TINY},
            "seq_length_tokens": SEQ_LENGTH_TOKENS,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "data": {"num_workers": workers, "prefetch_factor": PREFETCH_FACTOR},
            "device": "cpu",
            "global_batch_size": MICRO_BATCHES * MICRO_BATCH_SIZE * ranks,
        }
        measured = {
            "config": config,
            "cached": False,
            "round": 0,
            "window_s": WINDOW_S,
            "min_steps": MIN_STEPS,
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


WITHOUT_WORKERS = {"workers": 0}
TWO_WORKERS = {"workers": 2}
CACHED = {"workers": 0, "cached": True}


@pytest.mark.system
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(WITHOUT_WORKERS, id="without workers"),
        pytest.param(TWO_WORKERS, id="two workers"),
        pytest.param(CACHED, id="cached batches"),
    ],
)
def test_window_of_real_steps_has_figures(window, changes):
    figures = window(**changes)
    assert figures.steps >= MIN_STEPS
    assert figures.optimizer_steps == figures.steps + WARM_UP_STEPS["cpu"]
    assert figures.window_end_s - figures.window_start_s >= WINDOW_S
    assert 0 < figures.tokens_per_s <= figures.padded_tokens_per_s
    assert 0 <= figures.data_wait_share <= 1
    # More than 64 MiB, as torch alone takes.
    assert figures.memory_bytes > 2**26
    assert figures.local_ranks == 1
    assert figures.gpus == ()
    assert figures.gradient_accumulation_steps == MICRO_BATCHES


@pytest.mark.system
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(WITHOUT_WORKERS, id="without workers"),
        pytest.param(CACHED, id="cached batches"),
    ],
)
def test_discards_warm_up_without_workers(window, changes):
    figures = window(**changes)
    assert figures.discarded_batches == WARM_UP_BATCHES
    assert figures.worker_bytes is None


@pytest.mark.system
def test_discards_prefetched_batches_of_workers(window):
    figures = window(**TWO_WORKERS)
    prefetched = 2 * PREFETCH_FACTOR
    discarded = figures.discarded_batches - WARM_UP_BATCHES
    # All that were ready, and as many again at most until one is not.
    assert prefetched < discarded <= 2 * prefetched


@pytest.mark.system
def test_window_with_workers_has_their_memory(window):
    figures = window(**TWO_WORKERS)
    assert 0 < figures.worker_bytes < figures.memory_bytes


@pytest.fixture
def flops_per_token(window):
    """Return the model FLOPs of one rank per non-padding token."""
    one_rank = window(0)
    return one_rank.model_flops_per_s / one_rank.tokens_per_s


@pytest.mark.system
def test_counts_model_flops_of_the_layer(flops_per_token):
    attention_weights = 4 * TINY["hidden_size"] ** 2
    mlp_weights = 2 * TINY["hidden_size"] * TINY["intermediate_size"]
    head_weights = TINY["hidden_size"] * VOCAB_SIZE
    # The last layer's keys and values are for every token, the rest and the head for
    # those to predict.
    least_flops = 6 * 2 * TINY["hidden_size"] ** 2
    most_flops = 6 * (attention_weights + mlp_weights + head_weights)
    assert least_flops < flops_per_token < most_flops


@pytest.mark.system
def test_counts_model_flops_of_all_ranks(window, flops_per_token):
    two_ranks = window(0, local_ranks=2)
    # Not exactly: the number of tokens to predict is random in every window.
    assert two_ranks.model_flops_per_s / two_ranks.tokens_per_s == pytest.approx(
        flops_per_token, rel=0.05
    )


@pytest.mark.system
def test_replayed_step_has_no_model_flops(window):
    assert window(0, replayed_step_s=0.01).model_flops_per_s is None


@pytest.mark.system
@pytest.mark.parametrize(
    ("changes", "micro_batch_s"),
    [
        pytest.param({"workers": 0}, BATCH_S, id="without workers"),
        pytest.param({"workers": 2}, BATCH_S / 2, id="two slow workers"),
        pytest.param({"workers": 4}, REPLAYED_STEP_S, id="workers that keep up"),
        pytest.param(
            {"workers": 0, "cached": True}, REPLAYED_STEP_S, id="cached batches"
        ),
    ],
)
def test_rate_of_a_slow_dataset_follows_from_workers(window, changes, micro_batch_s):
    # The rates of the cases differ by a third at least. Other work on the machine can
    # only make a window slower, so one of a few that is as expected will do.
    expected_rate = pytest.approx(MICRO_BATCH_TOKENS / micro_batch_s, rel=0.25)
    for _ in range(4):
        figures = window(
            **changes,
            replayed_step_s=REPLAYED_STEP_S,
            sample_delay_s=SAMPLE_DELAY_S,
            window_s=0.9,
        )
        if figures.padded_tokens_per_s == expected_rate:
            break
    assert figures.padded_tokens_per_s == expected_rate
    if "cached" not in changes:
        wait_share = max(0.0, 1 - REPLAYED_STEP_S / micro_batch_s)
        assert figures.data_wait_share == pytest.approx(wait_share, abs=0.25)


@pytest.mark.system
def test_figures_of_two_ranks_are_summed(window):
    one_rank = window(0, replayed_step_s=0.05, window_s=0.5)
    two_ranks = window(0, replayed_step_s=0.05, window_s=0.5, local_ranks=2)
    assert two_ranks.local_ranks == 2
    assert two_ranks.padded_tokens_per_s == pytest.approx(
        2 * one_rank.padded_tokens_per_s, rel=0.25
    )
    # The two processes share the pages of libraries.
    assert two_ranks.memory_bytes > 1.2 * one_rank.memory_bytes
