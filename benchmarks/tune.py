"""``python -m benchmarks.tune``: the overhead of a tuning, and its quality.

Overhead: a real ``autotune tune`` of a small model on this machine's CPU, in its own
process. Time that does not pass while trials, their server or ranks run or start is
overhead: Python's own start, decisions, trial logs, the report.

Regret: ``benchmarks.grid`` measured every cell of the search space of two models on a
CPU, the likely best ones many times, and kept the measurements. Searches are replayed
against them, each with another seed: a window returns its cell's mean, off by one of
the recorded ratios. The chosen cell is compared with the best cell of the grid by the
grid's own means, of which the best is flattered by chance. Short windows deviate twice
as much as the recorded full ones. Losses are taken to be equal whatever the precision,
as this benchmark is about speed. Compiled cells are not in the grid: each would take a
minute on a CPU.

Samplers: our sampler and Optuna's TPE propose configurations in Optuna's own loop, from
the same recorded windows, for the same number of trials. The six best by their mean are
then measured four more times each, and the best mean wins, so that only the proposals
differ. TPE gets sizes as numbers, and the nearest recorded one of the layout.
"""

import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna

from autotune.machine.host import SystemHost
from autotune.sampler.decide.discrete_space import values_in
from autotune.sampler.pairwise_effects import PairwiseEffectsSampler
from autotune.search.configuration import Configuration
from autotune.search.measure import Exploration
from autotune.search.request import ExploreRequest
from autotune.search.verification import confirm
from autotune.search.windows import StepWindows
from autotune.subjects.mlm.settings import (
    ROUNDING_SETTINGS,
    LayoutFacts,
    MlmSettings,
    choice_words,
)
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.mlm.workers.windows import windows_of_trainer
from autotune.subjects.subject import MICRO_BATCH_SIZE, Setting
from autotune.trials.outcomes import Measured, Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import Trial
from autotune.workers.decide.loader_limits import LoaderLimits
from benchmarks.bars import Bar, Direction, bars_of, finish, measuring, parser, run
from benchmarks.grid import GRID, Grid, read_grids
from testbed.corpora import real_lengths, write_corpus
from testbed.fakes import FakeClock, FakeMachine
from testbed.programs import run_program
from trainer.data.sequence_statistics import SequenceStatistics
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import ModelSettings, TrainConfig

REPLAYS = 40
SAMPLER_TRIAL_SHARES = (0.2, 0.3)
"""Trials of a sampler in Optuna's own loop, as a share of the grid's configurations."""
FINALISTS, FINALIST_WINDOWS = 6, 4
"""Configurations that are measured again after these trials, and how often."""
MINUTES = 15.0
"""Of a replayed exploration: the command's own default for a model."""
BARS: dict[str, tuple[str, Direction, float]] = {
    "tune_overhead_share": ("share", "<=", 0.05),
    "tune_of_grid_best_share": ("share", ">=", 0.97),
    "tune_explored_against_unexplored_least_ratio": ("ratio", ">=", 1.0),
    "tune_explore_most_trials_share": ("share", "<=", 0.35),
}
TINY = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
TUNE_MINUTES, SAMPLES = 3.0, 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One exploration against recorded readings."""

    seed: int
    chosen: str
    of_best_share: float
    """Tokens/s of the chosen configuration, as a share of the best cell's."""
    to_unexplored: float
    """The same against the starting configuration."""
    trials_share: float
    """Cells that were tried, as a part of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerResult:
    """Searches of a grid with one sampler in Optuna's own loop."""

    model: str
    sampler: str
    trials_share: float
    """Trials, as a share of the grid's configurations."""
    mean_share: float
    """Rate of the configuration that was found, as a share of the best: mean."""
    worst_share: float
    """The least of these shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """A real tuning."""

    seconds: float
    """Of the whole process, from outside."""
    seconds_in_children: float

    @property
    def share(self) -> float:
        """Share of the time that was not spent in children."""
        return 1 - self.seconds_in_children / self.seconds


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, replay, print and return the exit code."""
    options_of = parser("tune", "Measure what tuning costs and finds.")
    options_of.add_argument("--replays", type=int, default=REPLAYS, help="of each grid")
    options_of.add_argument(
        "--minutes", type=float, default=TUNE_MINUTES, help="of the real tuning"
    )
    options_of.add_argument(
        "--grid", type=Path, default=GRID, help="what benchmarks.grid recorded"
    )
    options = options_of.parse_args(arguments)
    grids = read_grids(options.grid)
    replays = {
        grid.model: [replay(grid, seed) for seed in range(options.replays)]
        for grid in grids
    }
    overhead = measure_overhead(options.minutes)
    bars = make_bars(replays, overhead)
    content = {
        "overhead": asdict(overhead) | {"share": overhead.share},
        "grids": summary(grids),
        "samplers": [
            asdict(result)
            for grid in grids
            for result in compare_samplers(grid, options.replays)
        ],
        "replays": {
            model: [asdict(outcome) for outcome in outcomes]
            for model, outcomes in replays.items()
        },
    }
    return finish(options.json, bars, content)


def make_bars(replays: dict[str, list[Replay]], overhead: Overhead) -> list[Bar]:
    """Return all bars; of replays, the model with the worst result counts."""
    replays_of_models = list(replays.values())
    regret = min(
        statistics.fmean(outcome.of_best_share for outcome in outcomes)
        for outcomes in replays_of_models
    )
    least_to_unexplored = min(
        outcome.to_unexplored for outcomes in replays_of_models for outcome in outcomes
    )
    largest_trials_share = max(
        outcome.trials_share for outcomes in replays_of_models for outcome in outcomes
    )
    return bars_of(
        BARS,
        dict(
            zip(
                BARS,
                (overhead.share, regret, least_to_unexplored, largest_trials_share),
                strict=True,
            )
        ),
    )


def replay(grid: Grid, seed: int) -> Replay:
    """Explore a recorded space."""
    clock = FakeClock()
    with tempfile.TemporaryDirectory() as place:
        runner = TrialRunner(
            machine=_machine(grid, clock, seed),
            trial_log=TrialLog(Path(place), "replay"),
            site="grid",
            clock=clock,
        )
        search = Exploration(request=_request(grid), runner=runner)
        search.run()
        choice = confirm(search)
    chosen = choice.candidate if choice.adopted else grid.starting
    means = grid.mean_log_ratios()
    best = max(means.values())
    return Replay(
        seed=seed,
        chosen=choice_words(chosen),
        of_best_share=math.exp(means[chosen] - best),
        to_unexplored=math.exp(means[chosen] - means[grid.starting]),
        trials_share=(len(search.state.tried) - 1) / len(means),
    )


def compare_samplers(grid: Grid, searches: int) -> list[SamplerResult]:
    """Search a grid with our sampler and with TPE, each so often."""
    results = []
    for trials_share in SAMPLER_TRIAL_SHARES:
        trials = round(trials_share * len(grid.ratios))
        for name in ("pairwise effects", "TPE"):
            shares = [
                search_by_sampler(grid, name, trials, seed) for seed in range(searches)
            ]
            results.append(
                SamplerResult(
                    model=grid.model,
                    sampler=name,
                    trials_share=trials_share,
                    mean_share=statistics.fmean(shares),
                    worst_share=min(shares),
                )
            )
    return results


def search_by_sampler(grid: Grid, name: str, trials: int, seed: int) -> float:
    """Return the rate of the configuration found, as a share of the best."""
    rng = random.Random(seed)
    means, deviations = grid.mean_log_ratios(), grid.deviations()
    windows: dict[Configuration, list[float]] = {}

    def measure(configuration: Configuration) -> float:
        deviation = 0.0
        if configuration != grid.starting:
            deviation = rng.choice(deviations)
        windows.setdefault(configuration, []).append(means[configuration] + deviation)
        return math.exp(windows[configuration][-1])

    def objective(trial: optuna.Trial) -> float:
        return measure(_nearest(grid, _suggested(grid, trial)))

    recorded = set(grid.ratios)
    sampler: optuna.samplers.BaseSampler = optuna.samplers.TPESampler(seed=seed)
    if name != "TPE":
        sampler = PairwiseEffectsSampler(
            candidates=list(grid.ratios),
            is_possible=lambda params: params in recorded,
            seed=seed,
        )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    # Both know the starting configuration, which a tuning has from the probe.
    study.enqueue_trial(dict(grid.starting))
    study.optimize(objective, n_trials=trials)
    finalists = sorted(windows, key=lambda cell: -statistics.fmean(windows[cell]))[
        :FINALISTS
    ]
    for finalist in finalists:
        for _ in range(FINALIST_WINDOWS):
            measure(finalist)
    chosen = max(finalists, key=lambda cell: statistics.fmean(windows[cell]))
    return math.exp(means[chosen] - max(means.values()))


def _suggested(grid: Grid, trial: optuna.Trial) -> Configuration:
    """Return a configuration, whose size may not be recorded for its layout."""
    values = values_in((grid.starting, *grid.ratios))
    sizes = [int(size) for size in values.pop(MICRO_BATCH_SIZE)]
    suggested = {
        name: trial.suggest_categorical(name, values_of_setting)
        for name, values_of_setting in values.items()
    }
    size = trial.suggest_int(MICRO_BATCH_SIZE, min(sizes), max(sizes), log=True)
    return grid.starting.but(suggested | {MICRO_BATCH_SIZE: size})


def _nearest(grid: Grid, configuration: Configuration) -> Configuration:
    """Return the recorded configuration of the nearest size, by factor."""
    size = int(configuration[MICRO_BATCH_SIZE])
    same_kind = [
        recorded
        for recorded in grid.ratios
        if recorded.but({MICRO_BATCH_SIZE: size}) == configuration
    ]
    return min(
        same_kind,
        key=lambda recorded: abs(math.log(int(recorded[MICRO_BATCH_SIZE]) / size)),
    )


def _machine(grid: Grid, clock: FakeClock, seed: int) -> FakeMachine:
    """Reads what was recorded, with deviations in an order of chance."""
    rng = random.Random(seed)
    means, deviations = grid.mean_log_ratios(), grid.deviations()

    def simulate(trial: Trial) -> Outcome:
        config = trial.config
        cell = Configuration.of({name: config[name] for name in grid.starting})
        short = trial.measured["min_steps"] == 1
        # A recorded ratio deviates by what both of its windows do, so all of it is the
        # cell's.
        deviation = (
            0.0
            if cell == grid.starting
            else rng.choice(deviations) * (2 if short else 1)
        )
        clock.sleep(grid.seconds[cell])
        here_and_now = random.Random(f"{seed} {trial.measured['round']}").choice(
            grid.reference_rates
        )
        rate = here_and_now * math.exp(means[cell] + deviation)
        losses = [4 - step / 100 for step in range(trial.measured["min_steps"])]
        return Measured(
            figures=_figures(rate)
            | ({"losses": losses} if trial.step_arguments.get("losses") else {})
        )

    return FakeMachine(simulate)


def _figures(tokens_per_s: float) -> dict[str, Any]:
    return {
        "optimizer_steps": 4,
        "discarded_batches": 0,
        "steps": 2,
        "unit": "tokens",
        "units_per_s": tokens_per_s,
        "padded_units_per_s": tokens_per_s,
        "data_wait_share": 0.0,
        "window_start_s": 0.0,
        "window_end_s": 1.0,
        "local_ranks": 1,
        "gradient_accumulation_steps": 1,
        "memory_bytes": None,
        "worker_bytes": None,
        "storage_bytes_per_s": None,
    }


def _request(grid: Grid) -> ExploreRequest:
    """Return the request for an exploration of the grid's space.

    Rates are used as they were recorded, with what sequences hold included.
    """
    limits = LoaderLimits(
        host=SystemHost().facts([Path()]),
        local_ranks=1,
        batch_bytes=2**20,
        prefetch_factor=2,
    )
    model = ModelSettings(name=grid.model, config={"model_type": "bert"})
    request = SweepRequest(
        data=Path("grid"),
        reports=Path("grid"),
        budget_s=60 * MINUTES,
        window_s=grid.window_s,
        trial_timeout_s=600.0,
    )
    config = TrainConfig(model=model)
    subject = MlmSubject(
        config=config,
        vocab_size=100,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    )
    settings = _settings(grid, config)
    others = (cell for cell in grid.ratios if cell != grid.starting)
    return ExploreRequest(
        settings=settings,
        configurations=(grid.starting, *others),
        windows=StepWindows(
            settings=settings, windows=windows_of_trainer(subject, request, limits)
        ),
        budget_s=60 * MINUTES,
        trial_timeout_s=600.0,
    )


def _settings(grid: Grid, config: TrainConfig) -> MlmSettings:
    """Return the settings of a grid's space.

    Every micro-batch is useful in full, and windows count their own tokens: the
    recorded rates have both in them already.
    """
    values = values_in((grid.starting, *grid.ratios))
    sizes = values.pop(MICRO_BATCH_SIZE)
    layout = LayoutFacts(
        statistics=SequenceStatistics(
            mean_non_padding_tokens=1.0, mean_samples=1.0, max_mean_samples=1.0
        ),
        global_batch_size=math.lcm(*sizes),
        seq_length_tokens=1,
        is_trimmed=False,
        counts_own_tokens=True,
    )
    return MlmSettings(
        config=config,
        settings=tuple(
            Setting(
                name=name,
                values=tuple(values_of_setting),
                changes_rounding=name in ROUNDING_SETTINGS,
            )
            for name, values_of_setting in values.items()
        ),
        layouts={str(name): layout for name in values["layout"]},
    )


def measure_overhead(minutes: float) -> Overhead:
    """Run a real tuning in its own process."""
    with tempfile.TemporaryDirectory(prefix="tune-") as name:
        place = Path(name)
        (place / "tiny.json").write_text(json.dumps(TINY))
        data = write_corpus(place / "data", real_lengths(SAMPLES, seed=0))
        command = [
            sys.executable,
            "-m",
            "autotune",
            "tune",
            "--model",
            "tiny.json",
            "--data",
            str(data),
            "--device",
            "cpu",
            "--memory",
            "400MiB",
            "--seq-length",
            "128",
            "--global-batch-tokens",
            "4096",
            "--time-limit",
            f"{minutes:g}min",
            "--window",
            "0.5s",
            "--explore",
            "--here",
            "--json",
        ]
        began_s = time.monotonic()
        answer = run_program(command, timeout_s=3600.0, cwd=place, stderr=None)
        seconds = time.monotonic() - began_s
    return Overhead(
        seconds=seconds, seconds_in_children=json.loads(answer)["seconds_in_children"]
    )


def summary(grids: Sequence[Grid]) -> dict[str, Any]:
    """Describe the recorded spaces, by model."""
    summaries = {}
    for grid in grids:
        means = grid.mean_log_ratios()
        share = math.exp(means[grid.starting] - max(means.values()))
        summaries[grid.model] = {
            "cells": len(means),
            "window_ratio_sigma": statistics.pstdev(grid.deviations()),
            "unexplored_of_best_share": share,
        }
    return summaries


if __name__ == "__main__":
    run(main)
