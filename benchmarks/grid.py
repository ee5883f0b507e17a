"""``python -m benchmarks.grid``: measure all configurations of two models.

They are those of the explored space, on this machine's CPU. ``benchmarks.tune`` replays
explorations against these measurements. A round measures configurations in random
order, in groups beside the settings that result from the probe alone, so that a
machine's slow minutes weigh on both sides of each ratio. The first rounds are of all
configurations, the others of those that may still be the best: there the means must be
sure.

Run it on an idle machine: it takes about an hour. If it is interrupted, it resumes from
its trial log. Compiled configurations are left out: each would take a minute.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.base.window_statistics import scaled_residuals, trimmed_mean
from autotune.memory.stage import probe_all
from autotune.profiles.store import read_profile
from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import without_size
from autotune.search.request import ExploreRequest
from autotune.search.windows import WindowLength
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.mlm.memory.probe import MlmProbeRequest
from autotune.subjects.mlm.memory.probe_requests import requested_config
from autotune.subjects.mlm.search import explore_request
from autotune.trials.outcomes import Measured
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from testbed.corpora import real_lengths, write_corpus
from trainer.formats.presets import model_settings
from trainer.formats.progress import progress
from trainer.formats.train_config import ModelSettings

GRID = (
    Path(__file__).parent.parent / "reports" / "benchmarks" / "recorded" / "grid.json"
)
ROUNDS, MOST_ROUNDS = 2, 12
"""Of all cells, and of those that may be the best."""
TOGETHER, WINDOW_S, SAMPLES = 4, 2.0, 4000
MAY_BE_BEST_SIGMAS = 3.0
MIN_STEPS = 2
SMALL_MODERNBERT = {
    "model_type": "modernbert",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a length of rows."""

    settings: ModelSettings
    seq_length_tokens: int
    global_batch_tokens: int


CASES = (
    Case(
        settings=model_settings("bert-mini"),
        seq_length_tokens=128,
        global_batch_tokens=4096,
    ),
    Case(
        settings=ModelSettings(name="modernbert-tiny", config=SMALL_MODERNBERT),
        seq_length_tokens=256,
        global_batch_tokens=8192,
    ),
)


@dataclass(slots=True, kw_only=True)
class Grid:
    """Measurements of one model."""

    model: str
    starting: Configuration
    """Configuration that the probe alone chooses."""
    window_s: float
    ratios: dict[Configuration, list[float]] = field(default_factory=dict)
    """Ratios of tokens/s to the starting configuration of the same round, one for each
    round of a cell."""
    seconds: dict[Configuration, float] = field(default_factory=dict)
    """Median duration of a window, start included."""
    reference_rates: list[float] = field(default_factory=list)
    """Tokens/s of the starting configuration, for each group."""

    def mean_log_ratios(self) -> dict[Configuration, float]:
        """Return the mean of the logarithms of each cell's ratios."""
        return {
            cell: trimmed_mean([math.log(ratio) for ratio in ratios])
            for cell, ratios in self.ratios.items()
        }

    def deviations(self) -> list[float]:
        """Return how far the logarithm of each ratio is from its configuration's mean.

        It is scaled to single windows.
        """
        residuals_of_cells = [
            scaled_residuals([math.log(ratio) for ratio in ratios])
            for ratios in self.ratios.values()
        ]
        return [residual for residuals in residuals_of_cells for residual in residuals]

    def may_be_best(self) -> list[Configuration]:
        """Cells that are not surely slower than the fastest."""
        means, sigma = self.mean_log_ratios(), statistics.pstdev(self.deviations())
        best = max(means, key=lambda cell: means[cell])

        def surely_off(cell: Configuration) -> float:
            return (
                MAY_BE_BEST_SIGMAS
                * sigma
                * math.hypot(
                    *(len(self.ratios[compared]) ** -0.5 for compared in (cell, best))
                )
            )

        return [cell for cell in means if means[best] - means[cell] <= surely_off(cell)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        cells = [
            {
                "settings": dict(cell),
                "ratios": ratios,
                "seconds": round(self.seconds[cell], 3),
            }
            for cell, ratios in self.ratios.items()
        ]
        return {
            "model": self.model,
            "starting": dict(self.starting),
            "window_s": self.window_s,
            "reference_rates": self.reference_rates,
            "cells": cells,
        }

    @classmethod
    def of_json(cls, recorded: Mapping[str, Any]) -> "Grid":
        """Return a grid from its JSON."""
        cells = [
            (Configuration.of(record["settings"]), record)
            for record in recorded["cells"]
        ]
        return cls(
            model=recorded["model"],
            starting=Configuration.of(recorded["starting"]),
            window_s=recorded["window_s"],
            reference_rates=recorded["reference_rates"],
            ratios={cell: record["ratios"] for cell, record in cells},
            seconds={cell: record["seconds"] for cell, record in cells},
        )


def read_grids(path: Path) -> list[Grid]:
    """Read the recorded grids."""
    return [Grid.of_json(grid) for grid in json.loads(path.read_text())["grids"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, and write them after each."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grid",
        description="Measure whole spaces of settings.",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=GRID,
        metavar="FILE",
        help="file for the measurements",
    )
    parser.add_argument(
        "--place",
        type=Path,
        default=Path("grid"),
        help="directory of trial log and dataset",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every cell")
    parser.add_argument(
        "--most-rounds",
        type=int,
        default=MOST_ROUNDS,
        help="of those that may be the best",
    )
    options = parser.parse_args(arguments)
    data = options.place / "data"
    if not (data / "manifest.json").is_file():
        write_corpus(data, real_lengths(SAMPLES, seed=0))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    grids = []
    for case in CASES:
        grids.append(
            measure(case, data, options.place, options.rounds, options.most_rounds)
        )
        content = {"grids": [grid.to_json() for grid in grids]}
        write_atomically(options.json, json.dumps(content) + "\n")
    return 0


def measure(case: Case, data: Path, place: Path, rounds: int, most_rounds: int) -> Grid:
    """Probe a model, and read every cell around what the probe came to."""
    step = {
        "seq_length_tokens": case.seq_length_tokens,
        "global_batch_tokens": case.global_batch_tokens,
    }
    probe_request = MlmProbeRequest(
        config=requested_config(case.settings, **step),
        data=data,
        reports=place / "reports",
        memory_bytes=2**30,
    )
    with open_subject("cpu", probe_request.requested_subject(), data) as bench:
        (probed,) = probe_all(bench, [probe_request], place / "profiles")
        stored = read_profile(probed.path)
        windows = SweepRequest(
            data=data, reports=place / "reports", budget_s=60e6, window_s=WINDOW_S
        )
        request = explore_request(bench, stored, probe_request, windows)
        request = replace(request, configurations=_fitting(request))
        return _read_all(
            bench,
            request,
            place / "reports" / case.settings.name / "grid",
            rounds=rounds,
            most_rounds=most_rounds,
        )


def _fitting(request: ExploreRequest) -> tuple[Configuration, ...]:
    """Return the configurations that are not compiled, and predicted to fit."""
    assert request.predictor is not None
    settings = request.settings
    plain = [
        configuration
        for configuration in request.configurations
        if not settings.starts_slowly(configuration)
    ]
    kinds = {without_size(settings, configuration) for configuration in plain}
    largest_sizes = {
        kind: request.predictor.predict(kind).largest_size for kind in kinds
    }
    fitting = []
    for configuration in plain:
        size = int(configuration[settings.size.name])
        largest_size = largest_sizes[without_size(settings, configuration)]
        if largest_size is None or size <= largest_size:
            fitting.append(configuration)
    return tuple(fitting)


def _read_all(
    bench: SubjectBench,
    request: ExploreRequest,
    trial_log: Path,
    *,
    rounds: int,
    most_rounds: int,
) -> Grid:
    starting = request.configurations[0]
    grid = Grid(
        model=bench.subject.name, starting=starting, window_s=request.windows.window_s
    )
    taken: dict[Configuration, list[float]] = {}
    site = bench.fingerprint
    with progress(f"grid of {grid.model}") as update:
        runner = bench.runner(trial_log, site, lambda *_: None, expected_trials=0)
        numbers = itertools.count()
        for turn in range(most_rounds):
            candidates = request.configurations if turn < rounds else grid.may_be_best()
            others = [cell for cell in candidates if cell != starting]
            for group in groups(others, turn):
                number = next(numbers)
                update(turn, most_rounds, f"{len(others)} cells, group {number}")
                rates = _read_group(request, runner, number, [starting, *group], taken)
                grid.reference_rates.append(round(rates[starting], 1))
                for cell in group:
                    if cell in rates:
                        grid.ratios.setdefault(cell, []).append(
                            round(rates[cell] / rates[starting], 4)
                        )
    grid.ratios[starting] = [1.0]
    grid.seconds = {cell: statistics.median(taken[cell]) for cell in grid.ratios}
    return grid


def groups(cells: Sequence[Configuration], turn: int) -> list[list[Configuration]]:
    """Return groups of configurations, in another random order in every round."""
    order = random.Random(turn).sample(cells, len(cells))
    return [order[start : start + TOGETHER] for start in range(0, len(order), TOGETHER)]


def _read_group(
    request: ExploreRequest,
    runner: TrialRunner,
    number: int,
    cells: list[Configuration],
    taken: dict[Configuration, list[float]],
) -> dict[Configuration, float]:
    rates: dict[Configuration, float] = {}
    names = [request.words(cell) for cell in cells]
    length = WindowLength(window_s=request.windows.window_s, min_steps=MIN_STEPS)
    for cell in cells if number % 2 == 0 else reversed(cells):
        trial = request.windows.trial(
            cell, length, round_number=number, interleaved_with=names
        )
        outcome = runner.run(trial, request.words(cell))
        if isinstance(outcome, Measured):
            rates[cell] = request.windows.read(cell, outcome).units_per_s
            taken.setdefault(cell, []).append(runner.finished[-1].seconds)
    if not all(map(math.isfinite, rates.values())) or cells[0] not in rates:
        raise ValueError(f"group {number} could not be read: {names[0]}")
    return rates


if __name__ == "__main__":
    sys.exit(main())
