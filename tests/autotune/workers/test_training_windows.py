"""Real windows on a tiny dataset, with real DataLoader workers and ranks."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured
from autotune.workers.decide.window_time import WARM_UP_STEPS
from autotune.workers.windows import window_trial
from testbed.datasets import write_dataset
from testbed.examples.feeds import LIMITS, windows_of
from trainer.formats.train_config import TrainConfig

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
MANY_STEPS = 60
"""Steps over which the share of predicted tokens is nearly the same."""
WARM_UP_BATCHES = WARM_UP_STEPS["cpu"] * MICRO_BATCHES
REPLAYED_STEP_S = 0.02
"""Time of a replayed micro-batch."""
SAMPLE_DELAY_S = 0.015
"""Time that the simulated storage takes for a sample."""
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


@pytest.fixture(scope="module")
def measure_window(started_server, data):
    """Return a function that measures a window of the trainer's own step on one rank.

    Its changes replace fields of the ``SweepRequest``.
    """

    def measure(
        num_workers: int,
        *,
        local_ranks: int = 1,
        cached: bool = False,
        min_steps: int = MIN_STEPS,
        **changes,
    ) -> WindowFigures:
        config = TrainConfig.model_validate(
            {
                "model": {"name": "tiny", "config": TINY},
                "seq_length_tokens": SEQ_LENGTH_TOKENS,
                "micro_batch_size": MICRO_BATCH_SIZE,
                "data": {
                    "num_workers": num_workers,
                    "prefetch_factor": PREFETCH_FACTOR,
                },
                "device": "cpu",
                "global_batch_size": MICRO_BATCHES * MICRO_BATCH_SIZE * local_ranks,
            }
        )
        windows = windows_of(
            config,
            limits=replace(LIMITS, local_ranks=local_ranks),
            data=data,
            trial_timeout_s=60.0,
            **{"window_s": WINDOW_S} | changes,
        )
        trial = window_trial(windows, 0, [], cached=cached, min_steps=min_steps)
        outcome = started_server.run(trial)
        assert isinstance(outcome, Measured), outcome
        return WindowFigures.of(outcome)

    return measure


@pytest.fixture(scope="module")
def without_workers(measure_window):
    """Return a window whose batches the main process loads."""
    return measure_window(num_workers=0)


@pytest.fixture(scope="module")
def with_two_workers(measure_window):
    """Return a window whose batches two DataLoader workers load."""
    return measure_window(num_workers=2)


@pytest.fixture(scope="module")
def on_cached_batches(measure_window):
    """Return a window without data loading."""
    return measure_window(num_workers=0, cached=True)


every_source_of_batches = pytest.mark.parametrize(
    "source", ["without_workers", "with_two_workers", "on_cached_batches"]
)


@pytest.mark.system
@every_source_of_batches
def test_window_of_real_steps_has_figures(source, request):
    figures = request.getfixturevalue(source)
    assert figures.steps >= MIN_STEPS
    assert figures.optimizer_steps == figures.steps + WARM_UP_STEPS["cpu"]
    assert figures.window_end_s - figures.window_start_s >= WINDOW_S
    assert 0 < figures.units_per_s <= figures.padded_units_per_s
    assert 0 <= figures.data_wait_share <= 1
    # More than 64 MiB, as torch alone takes.
    assert figures.memory_bytes > 2**26
    assert figures.local_ranks == 1
    assert figures.gpus == ()
    assert figures.gradient_accumulation_steps == MICRO_BATCHES
    assert figures.unit == "tokens"
    assert figures.counts_padding


@pytest.mark.system
@pytest.mark.parametrize("source", ["without_workers", "on_cached_batches"])
def test_discards_warm_up_without_workers(source, request):
    figures = request.getfixturevalue(source)
    assert figures.discarded_batches == WARM_UP_BATCHES
    assert figures.worker_bytes is None


@pytest.mark.system
def test_discards_prefetched_batches_of_workers(with_two_workers):
    prefetched = 2 * PREFETCH_FACTOR
    discarded = with_two_workers.discarded_batches - WARM_UP_BATCHES
    # All that were ready, and as many again at most until one is not.
    assert prefetched < discarded <= 2 * prefetched


@pytest.mark.system
def test_window_with_workers_has_their_memory(with_two_workers):
    assert 0 < with_two_workers.worker_bytes < with_two_workers.memory_bytes


def flops_per_token(figures: WindowFigures) -> float:
    """Return the model FLOPs per non-padding token."""
    return figures.model_flops_per_s / figures.units_per_s


@pytest.mark.system
def test_counts_model_flops_of_the_layer(without_workers):
    attention_weights = 4 * TINY["hidden_size"] ** 2
    mlp_weights = 2 * TINY["hidden_size"] * TINY["intermediate_size"]
    head_weights = TINY["hidden_size"] * VOCAB_SIZE
    # Six FLOPs per weight and token. The last layer's keys and values are for every
    # token, the rest of it and the head for those to predict.
    least_flops = 6 * 2 * TINY["hidden_size"] ** 2
    most_flops = 6 * (attention_weights + mlp_weights + head_weights)
    assert least_flops < flops_per_token(without_workers) < most_flops


@pytest.mark.system
def test_counts_model_flops_of_all_ranks(measure_window):
    # The number of tokens to predict is random in every step, so many are averaged.
    one_rank = measure_window(num_workers=0, min_steps=MANY_STEPS)
    two_ranks = measure_window(num_workers=0, local_ranks=2, min_steps=MANY_STEPS)
    assert flops_per_token(two_ranks) == pytest.approx(
        flops_per_token(one_rank), rel=0.05
    )


@pytest.mark.system
def test_replayed_step_has_no_model_flops(measure_window):
    replayed = measure_window(num_workers=0, replayed_step_s=0.01)
    assert replayed.model_flops_per_s is None


def window_of_rate(measure_window, tokens_per_s, **changes) -> WindowFigures:
    """Return a window with about this rate of tokens, padding included.

    Other work on the machine can only make a window slower. So up to four windows are
    measured until one has the rate; else the last one is returned.
    """
    for _ in range(4):
        figures = measure_window(**changes)
        if figures.padded_units_per_s == pytest.approx(tokens_per_s, rel=0.25):
            break
    return figures


@pytest.mark.system
@pytest.mark.parametrize(
    ("num_workers", "cached", "micro_batch_s"),
    [
        pytest.param(0, False, BATCH_S, id="without workers"),
        pytest.param(2, False, BATCH_S / 2, id="two slow workers"),
        pytest.param(4, False, REPLAYED_STEP_S, id="workers that keep up"),
        pytest.param(0, True, REPLAYED_STEP_S, id="cached batches"),
    ],
)
def test_rate_of_a_slow_dataset_follows_from_workers(
    measure_window, num_workers, cached, micro_batch_s
):
    tokens_per_s = MICRO_BATCH_TOKENS / micro_batch_s
    figures = window_of_rate(
        measure_window,
        tokens_per_s,
        num_workers=num_workers,
        cached=cached,
        replayed_step_s=REPLAYED_STEP_S,
        sample_delay_s=SAMPLE_DELAY_S,
        window_s=0.9,
    )
    # The rates of the cases differ by a third at least.
    assert figures.padded_units_per_s == pytest.approx(tokens_per_s, rel=0.25)
    # The simulated GPU waits for all of a micro-batch's time but its own step.
    wait_share = 1 - REPLAYED_STEP_S / micro_batch_s
    assert figures.data_wait_share == pytest.approx(wait_share, abs=0.25)


@pytest.mark.system
def test_figures_of_two_ranks_are_summed(measure_window):
    one_rank = measure_window(num_workers=0, replayed_step_s=0.05, window_s=0.5)
    two_ranks = measure_window(
        num_workers=0, replayed_step_s=0.05, window_s=0.5, local_ranks=2
    )
    assert two_ranks.local_ranks == 2
    # Each rank takes its own micro-batches in the same time.
    assert two_ranks.padded_units_per_s == pytest.approx(
        2 * one_rank.padded_units_per_s, rel=0.25
    )
    # Less than twice, as the two processes share the pages of libraries.
    assert two_ranks.memory_bytes > 1.2 * one_rank.memory_bytes
