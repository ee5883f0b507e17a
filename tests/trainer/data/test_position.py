"""Positions of single ranks, which join to the position of the job."""

import pytest

from trainer.data.position import UNKNOWN, Position, join_positions


def test_each_rank_contributes_its_lanes():
    positions = [
        Position(steps=1, rows=8, lanes=(5, UNKNOWN)),
        Position(steps=1, rows=8, lanes=(UNKNOWN, 3)),
    ]
    assert join_positions(positions) == Position(steps=1, rows=8, lanes=(5, 3))


def test_positions_of_different_steps_do_not_join():
    positions = [
        Position(steps=1, rows=8, lanes=(1,)),
        Position(steps=2, rows=16, lanes=(2,)),
    ]
    with pytest.raises(ValueError, match="different steps"):
        join_positions(positions)


def test_positions_that_lack_a_lane_do_not_join():
    with pytest.raises(ValueError, match="no rank follows lane 1"):
        join_positions([Position(steps=1, rows=8, lanes=(1, UNKNOWN))])
