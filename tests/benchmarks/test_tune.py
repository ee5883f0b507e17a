import itertools
import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from autotune.search.configuration import Configuration
from autotune.subjects.mlm.settings import choice_words
from benchmarks.bars import EXIT_HELD, EXIT_SHORT, exit_code
from benchmarks.grid import GRID, Grid, groups, read_grids
from benchmarks.tune import (
    Overhead,
    Replay,
    make_bars,
    replay,
    search_by_sampler,
)

WORTH = {"bf16": 1.3, "full": 0.75, "bucketed": 0.9, 4: 0.95, 16: 1.05}
NOISE = 0.03
ROUNDS = 6


def cell(
    precision="fp32",
    activation_checkpointing="none",
    layout="packed",
    micro_batch_size=8,
) -> Configuration:
    return Configuration.of(
        {
            "precision": precision,
            "attention": "auto",
            "activation_checkpointing": activation_checkpointing,
            "compile": False,
            "layout": layout,
            "micro_batch_size": micro_batch_size,
        }
    )


CELLS = [
    cell(*values)
    for values in itertools.product(
        ("fp32", "bf16"), ("none", "full"), ("packed", "bucketed"), (4, 8, 16)
    )
]
UNEXPLORED = cell()
BEST = cell(precision="bf16", micro_batch_size=16)
OVERHEAD = Overhead(seconds=100.0, seconds_in_children=97.0)


def worth(configuration: Configuration) -> float:
    return math.prod(WORTH.get(value, 1.0) for value in configuration.values())


def recorded(seed: int = 0, worth=worth) -> Grid:
    rng = random.Random(seed)
    ratios = {
        configuration: [
            worth(configuration) / worth(UNEXPLORED) * math.exp(rng.gauss(0, NOISE))
            for _ in range(ROUNDS)
        ]
        for configuration in CELLS
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


def test_grid_survives_writing(tmp_path):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"rounds": ROUNDS, "grids": [recorded().to_json()]}))
    (grid,) = read_grids(path)
    assert grid == recorded()
    assert statistics.pstdev(grid.deviations()) == pytest.approx(NOISE, rel=0.15)


def test_recorded_grids_are_readable():
    for grid in read_grids(GRID):
        assert grid.starting in grid.ratios
        assert len(grid.ratios) > 100


def test_round_has_every_cell_once():
    first, second = (
        [configuration for group in groups(CELLS, turn) for configuration in group]
        for turn in (0, 1)
    )
    assert set(first) == set(second) == set(CELLS)
    assert len(first) == len(second) == len(CELLS)
    assert first != second


def test_more_rounds_narrow_the_candidates():
    grid = recorded()
    candidates = grid.may_be_best()
    assert BEST in candidates
    assert len(candidates) < 10
    assert min(worth(configuration) for configuration in candidates) > 0.9 * worth(BEST)
    few = replace(
        grid,
        ratios={
            configuration: ratios[:2] for configuration, ratios in grid.ratios.items()
        },
    )
    assert len(few.may_be_best()) > len(candidates)


def test_replay_finds_the_best_configuration():
    replays = [replay(recorded(), seed) for seed in range(4)]
    assert replay(recorded(), 3) == replays[3]
    assert min(replay_result.of_best_share for replay_result in replays) > 0.95
    assert min(replay_result.to_unexplored for replay_result in replays) > 1.2
    assert max(replay_result.trials_share for replay_result in replays) <= 0.7
    assert choice_words(BEST) in {replay_result.chosen for replay_result in replays}
    replays = replay(
        recorded(
            worth=lambda configuration: 1.0 if configuration == UNEXPLORED else 0.8
        ),
        0,
    )
    assert (replays.chosen, replays.to_unexplored) == (choice_words(UNEXPLORED), 1.0)


@pytest.mark.parametrize("sampler", ["pairwise effects", "TPE"])
def test_samplers_search_in_the_same_loop(sampler):
    shares = [search_by_sampler(recorded(), sampler, 12, seed) for seed in range(3)]
    assert shares[2] == search_by_sampler(recorded(), sampler, 12, 2)
    assert all(0.5 < share <= 1 for share in shares)
    assert max(shares) > 0.9


def test_worst_model_counts():
    replays = {
        "good": [replayed()],
        "bad": [replayed(of_best_share=0.98), replayed(of_best_share=0.92)],
    }
    bars = {bar.name: bar for bar in make_bars(replays, OVERHEAD)}
    assert bars["tune_of_grid_best_share"].figure == pytest.approx(0.95)
    assert not bars["tune_of_grid_best_share"].holds
    assert bars["tune_overhead_share"].figure == pytest.approx(0.03)
    assert bars["tune_overhead_share"].holds


@pytest.mark.parametrize(
    "changes",
    [{"of_best_share": 0.9}, {"to_unexplored": 0.99}, {"trials_share": 0.36}],
    ids=lambda changes: str(*changes),
)
def test_each_bar_can_be_short(changes):
    assert exit_code(make_bars({"a": [replayed()]}, OVERHEAD)) == EXIT_HELD
    assert exit_code(make_bars({"a": [replayed(**changes)]}, OVERHEAD)) == EXIT_SHORT
