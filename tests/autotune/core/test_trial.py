from autotune.core.outcome import Measured
from autotune.core.trial import FeedFigures, StepFigures, TrialRecord

OLD = {
    "optimizer_steps": 2, "step_s": [0.5], "slot_tokens_per_step": 64, "peak_bytes": 10,
    "outside_allocator_bytes": None, "loss": 1.0,
}  # fmt: skip


def test_figures_from_before_ranks_were_told_apart_are_those_of_one():
    assert StepFigures.of(Measured(figures=OLD)).local_ranks == 1
    assert StepFigures.of(Measured(figures=OLD | {"local_ranks": 2})).local_ranks == 2


FEED = {
    "optimizer_steps": 9, "discarded_batches": 2, "micro_batches_per_step": 1,
    "steps": 7, "real_tokens_per_s": 5.0, "slot_tokens_per_s": 8.0,
    "data_wait_share": 0.5, "window_start_s": 1.0, "window_end_s": 2.0, "local_ranks": 1, "memory_bytes": None,
    "worker_bytes": None, "storage_bytes_per_s": None,
}  # fmt: skip


def test_what_gpus_did_is_read_without_their_series():
    gpus = [{"samples": 3, "utilisation_share": 0.5, "series": {"time_s": [1.0, 2.0]}}]
    figures = FeedFigures.of(Measured(figures=FEED | {"gpus": gpus}))
    assert [(one.samples, one.utilisation_share, one.power_w) for one in figures.gpus] == [(3, 0.5, None)]
    assert FeedFigures.of(Measured(figures=FEED)).gpus == ()


def test_a_feed_window_of_another_version_is_no_record():
    record = {
        "time_utc": "2026-01-01T00:00:00Z", "site": "here", "key": "k", "job": "feed", "measured": {}, "label": "x",
        "outcome": {"kind": "measured", "figures": FEED}, "seconds": 1.0,
    }  # fmt: skip
    assert TrialRecord.of(record) is not None
    old = {name: figure for name, figure in FEED.items() if name != "steps"} | {"step_s": [0.1]}
    assert TrialRecord.of(record | {"outcome": {"kind": "measured", "figures": old}}) is None
