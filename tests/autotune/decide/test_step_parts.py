"""What rows tell of all ranks: late, and not in every row."""

import pytest

from autotune.decide.bottleneck import parts_of_rows, uneven_share
from tests.autotune.decide.worlds import World, run_of, settings
from trainer.record import StepRow

TWO = World(ranks_per_node=2, slow_rank=1.5)


def rows(**changes: object) -> list[StepRow]:
    return [row.model_copy(update=changes) for row in run_of(TWO, settings(TWO), steps=12).steps]


def share(of: list[StepRow], cause: str) -> float:
    return next(part.share for part in parts_of_rows(of, "x", 1.0) if part.cause == cause)


def test_rows_that_do_not_tell_of_all_ranks_yet_are_taken_for_like_the_others():
    told = rows()
    late = [row.model_copy(update={"slowest_rank": None, "slowest_rank_ratio": None}) for row in told[:6]] + told[6:]
    assert share(late, "straggler") == pytest.approx(share(told, "straggler"), rel=0.05)


def test_waits_of_another_rank_are_taken_for_like_those_that_are_told():
    wait_s = 0.2 * rows()[0].step_s
    told = rows(longest_data_wait_s=wait_s)
    late = [row.model_copy(update={"longest_data_wait_s": None}) for row in told[:6]] + told[6:]
    assert share(late, "input") == pytest.approx(share(told, "input"), rel=0.05)


def test_one_slow_rank_is_not_uneven():
    assert uneven_share(rows()) == 0


def test_another_slow_rank_every_time_is_uneven_where_rows_are_alike():
    turns = [row.model_copy(update={"slowest_rank": number % 2}) for number, row in enumerate(rows())]
    assert uneven_share(turns) > 0.1
    widths = [row.model_copy(update={"slot_tokens": 1000 + number}) for number, row in enumerate(turns)]
    assert uneven_share(widths) == 0
