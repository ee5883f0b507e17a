import pytest

from autotune.core.outcome import Measured
from benchmarks.corpora import real_lengths, write_learnable_corpus
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage import workers
from tests.benchmarks.gpu.rigs import facts, make_rig
from tests.fakes import FakeClock

STEP_S, STEPS = 0.08, 25


def feeding(clock: FakeClock, samples_per_step: float):
    """A step of 80 ms, fed by workers of whom each needs as long for a batch as its samples' delays add up to."""

    def simulate(trial):
        config, delay_s = trial.measured["config"], trial.measured.get("sample_delay_s", 0.0)
        count = config["data"]["loader_workers"]
        batch_s = 0.0 if trial.measured["cached"] else delay_s * samples_per_step / max(1, count)
        step_s = STEP_S + batch_s if count == 0 else max(STEP_S, batch_s)
        seconds = STEPS * step_s
        start_s = clock.monotonic_s()
        clock.sleep(seconds + 1.0)
        slots = config["micro_batch_rows"] * config["seq_length_tokens"]
        return Measured(
            figures={
                "optimizer_steps": STEPS + 4, "discarded_batches": 4, "steps": STEPS,
                "real_tokens_per_s": 0.99 * slots / step_s, "slot_tokens_per_s": slots / step_s,
                "data_wait_share": 1 - STEP_S / step_s, "window_start_s": start_s, "window_end_s": start_s + seconds,
                "local_ranks": 1, "micro_batches_per_step": 1, "memory_bytes": 2**30, "worker_bytes": None,
                "storage_bytes_per_s": 0.0,
            }
        )  # fmt: skip

    return simulate


def swept(tmp_path, seconds: float):
    clock = FakeClock()
    data = write_learnable_corpus(tmp_path / "data", real_lengths(4000, 0), real_lengths(64, 1), vocab_size=1000)
    samples_per_step = 2.1 * FULL.workers_rows
    rig = make_rig(tmp_path, feeding(clock, samples_per_step), sizes=FULL, clock=clock, data=data)
    sheet, error = Sheet(), None
    try:
        workers.measure(rig, sheet, TimeBox(clock=clock, end_s=clock.monotonic_s() + seconds))
    except NoTimeLeft as no_time:
        error = no_time
    return {figure.name: figure for figure in sheet.figures}, sheet.details, error


def test_the_slow_dataset_needs_what_follows_by_arithmetic(tmp_path):
    figures, details, error = swept(tmp_path, 600)
    assert error is None
    assert figures["fast_dataset_workers_count"].value == 0
    assert figures["slow_dataset_workers_count"].value == workers.SLOW_ANSWER
    assert figures["slow_dataset_workers_off_count"].value == 0
    assert figures["chosen_data_wait_share"].value < 0.01
    waits = {row["loader_workers"]: row["data_wait_share"] for row in details["slow"]["rows"]}
    assert waits[2] > 0.2


def test_the_fast_dataset_is_kept_where_there_is_no_time_for_the_slow_one(tmp_path):
    figures, _, error = swept(tmp_path, 38)
    assert error is not None
    assert figures["fast_dataset_workers_count"].value == 0
    assert "chosen_data_wait_share" not in figures


def test_a_watched_gpu_is_no_longer_sampled_afterwards(tmp_path):
    rig = make_rig(tmp_path, lambda trial: None, gpu=facts())
    with pytest.raises(RuntimeError, match="on purpose"), workers._watched(rig) as machine:
        assert machine is not rig.machine
        raise RuntimeError("on purpose")
    with workers._watched(make_rig(tmp_path / "cpu", lambda trial: None)) as machine:
        assert not hasattr(machine, "_monitor")
