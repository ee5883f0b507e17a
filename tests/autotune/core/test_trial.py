from autotune.core.outcome import Measured
from autotune.core.trial import StepFigures

OLD = {
    "optimizer_steps": 2, "step_s": [0.5], "slot_tokens_per_step": 64, "peak_bytes": 10,
    "outside_allocator_bytes": None, "loss": 1.0,
}  # fmt: skip


def test_figures_from_before_ranks_were_told_apart_are_those_of_one():
    figures = StepFigures.of(Measured(figures=OLD))
    assert (figures.local_ranks, figures.peak_bytes_by_rank) == (1, ())


def test_figures_of_several_ranks_are_read_back():
    figures = StepFigures.of(Measured(figures=OLD | {"local_ranks": 2, "peak_bytes_by_rank": [9, 10]}))
    assert (figures.local_ranks, figures.peak_bytes_by_rank) == (2, (9, 10))
