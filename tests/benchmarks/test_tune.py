import itertools
import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from autotune.search.values import Configuration
from benchmarks.bars import EXIT_HELD, EXIT_SHORT, exit_code
from benchmarks.grid import GRID, Grid, groups, read_grids
from benchmarks.tune import Overhead, Replay, make_bars, replay

WORTH = {"bf16": 1.3, "full": 0.75, "bucketed": 0.9, 4: 0.95, 16: 1.05}
NOISE, ROUNDS = 0.03, 6


def cell(
    precision="fp32", activation_checkpointing="none", layout="packed", rows=8
) -> Configuration:
    return Configuration(
        precision=precision,
        attention="auto",
        activation_checkpointing=activation_checkpointing,
        compile=False,
        layout=layout,
        micro_batch_size=rows,
    )


CELLS = [
    cell(*values)
    for values in itertools.product(
        ("fp32", "bf16"), ("none", "full"), ("packed", "bucketed"), (4, 8, 16)
    )
]
UNEXPLORED, BEST = cell(), cell(precision="bf16", rows=16)
OVERHEAD = Overhead(seconds=100.0, seconds_in_children=97.0)


def worth(one: Configuration) -> float:
    return math.prod(WORTH.get(value, 1.0) for value in one.model_dump().values())


def recorded(seed: int = 0, worth=worth) -> Grid:
    rng = random.Random(seed)
    ratios = {
        one: [
            worth(one) / worth(UNEXPLORED) * math.exp(rng.gauss(0, NOISE))
            for _ in range(ROUNDS)
        ]
        for one in CELLS
    }
    return Grid(
        model="tiny",
        starting=UNEXPLORED,
        window_s=1.0,
        ratios=ratios | {UNEXPLORED: [1.0]},
        seconds=dict.fromkeys(CELLS, 3.0),
        reference_rates=[900.0, 1000.0, 1100.0],
    )


def replayed(**changes) -> Replay:
    known = {
        "seed": 0,
        "chosen": "x",
        "of_best_share": 0.99,
        "to_unexplored": 1.2,
        "trials_share": 0.2,
    }
    return Replay(**known | changes)


def test_a_grid_is_the_same_after_it_was_written_with_deviations_as_wide_as_those_of_single_windows(
    tmp_path,
):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"rounds": ROUNDS, "grids": [recorded().to_json()]}))
    (grid,) = read_grids(path)
    assert grid == recorded()
    assert statistics.pstdev(grid.deviations()) == pytest.approx(NOISE, rel=0.15)


def test_the_grids_that_were_recorded_are_read():
    for grid in read_grids(GRID):
        assert grid.starting in grid.ratios
        assert len(grid.ratios) > 100


def test_a_round_has_every_cell_once_in_another_order_each_time():
    first, second = (
        [one for group in groups(CELLS, turn) for one in group] for turn in (0, 1)
    )
    assert set(first) == set(second) == set(CELLS)
    assert len(first) == len(second) == len(CELLS)
    assert first != second


def test_what_is_read_on_is_all_that_may_be_the_best_and_less_after_more_rounds():
    grid = recorded()
    left = grid.may_be_best()
    assert BEST in left
    assert len(left) < 10
    assert min(worth(one) for one in left) > 0.9 * worth(BEST)
    few = replace(grid, ratios={one: ratios[:2] for one, ratios in grid.ratios.items()})
    assert len(few.may_be_best()) > len(left)


def test_a_replayed_exploration_finds_what_is_clearly_best_and_adopts_nothing_that_is_not_with_a_seed_the_same():
    found = [replay(recorded(), seed) for seed in range(4)]
    assert replay(recorded(), 3) == found[3]
    assert min(one.of_best_share for one in found) > 0.95
    assert min(one.to_unexplored for one in found) > 1.2
    assert max(one.trials_share for one in found) <= 0.7
    assert BEST.name in {one.chosen for one in found}
    found = replay(recorded(worth=lambda one: 1.0 if one == UNEXPLORED else 0.8), 0)
    assert (found.chosen, found.to_unexplored) == (UNEXPLORED.name, 1.0)


def test_the_model_that_comes_off_worst_counts():
    replays = {
        "good": [replayed()],
        "bad": [replayed(of_best_share=0.98), replayed(of_best_share=0.92)],
    }
    bars = {one.name: one for one in make_bars(replays, OVERHEAD)}
    assert bars["tune_of_grid_best_share"].figure == pytest.approx(0.95)
    assert not bars["tune_of_grid_best_share"].holds
    assert bars["tune_overhead_share"].figure == pytest.approx(0.03)
    assert bars["tune_overhead_share"].holds


@pytest.mark.parametrize(
    "changes",
    [{"of_best_share": 0.9}, {"to_unexplored": 0.99}, {"trials_share": 0.36}],
    ids=lambda one: str(*one),
)
def test_each_bar_can_be_short(changes):
    assert exit_code(make_bars({"a": [replayed()]}, OVERHEAD)) == EXIT_HELD
    assert exit_code(make_bars({"a": [replayed(**changes)]}, OVERHEAD)) == EXIT_SHORT
