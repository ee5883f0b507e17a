"""Windows of settings that are computed, and explorations over them.

They are for tests of the search.
"""

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from autotune.search.configuration import Configuration
from autotune.search.decide.configuration_space import configuration_space
from autotune.search.measure import Exploration
from autotune.search.request import ExploreRequest, StepPrediction, StepPredictor
from autotune.search.windows import StepWindows
from autotune.subjects.mlm.settings import (
    ROUNDING_SETTINGS,
    TRIED_VALUES,
    LayoutFacts,
    MlmSettings,
    arithmetic_words,
)
from autotune.subjects.subject import Argument, Setting
from autotune.trials.outcomes import Measured, Outcome
from autotune.trials.values import Trial
from testbed.examples.feeds import CONFIG, runner_on, windows_of
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from trainer.data.sequence_statistics import SequenceStatistics
from trainer.formats.train_config import Checkpointing

Choice = Mapping[str, Argument]
Rate = Callable[[Choice], float]
"""Real tokens/s of settings, without noise."""
LEVELS: Mapping[str, tuple[Argument, ...]] = {
    "precision": ("fp32", "bf16"),
    "attention": ("auto",),
    "activation_checkpointing": get_args(Checkpointing),
    "compile": (False, True),
    "layout": ("packed", "bucketed", "padded"),
}
GLOBAL_BATCH_SIZES = {"packed": 32, "bucketed": 64, "padded": 64}
LARGEST_SIZE = 64
STARTING_SIZE = 8


def settings_of(
    levels: Mapping[str, tuple[Argument, ...]] = LEVELS,
    global_batch_sizes: Mapping[str, int] = GLOBAL_BATCH_SIZES,
    ranks: int = 1,
) -> MlmSettings:
    """Return the trainer's settings with these values, whose windows count their own
    tokens."""
    layouts = {
        name: LayoutFacts(
            statistics=SequenceStatistics(
                mean_non_padding_tokens=100.0, mean_samples=1.0, max_mean_samples=1.0
            ),
            global_batch_size=size,
            seq_length_tokens=128,
            is_trimmed=name == "bucketed",
            counts_own_tokens=True,
        )
        for name, size in global_batch_sizes.items()
    }
    return MlmSettings(
        config=CONFIG.model_copy(update={"micro_batch_size": STARTING_SIZE}),
        settings=tuple(
            Setting(
                name=name, values=values, changes_rounding=name in ROUNDING_SETTINGS
            )
            for name, values in levels.items()
        ),
        layouts=layouts,
        ranks=ranks,
        left_out=("attention: varlen requires a GPU",),
    )


SETTINGS = settings_of()
CONFIGURATIONS = configuration_space(SETTINGS, SETTINGS.starting, LARGEST_SIZE)
STARTING = CONFIGURATIONS[0]
FEW = tuple(
    configuration
    for configuration in CONFIGURATIONS
    if not configuration["compile"]
    and configuration["activation_checkpointing"] != "selective"
    and configuration["layout"] != "bucketed"
)


def additive(effects: dict[object, float]) -> Rate:
    """Return rates in which each value of a setting has its factor.

    Micro-batches win less the larger they are.
    """

    def rate(choice: Choice) -> float:
        size = int(choice["micro_batch_size"])
        factors = (
            effects.get(value, 1.0)
            for name, value in choice.items()
            if name != "micro_batch_size"
        )
        return 1000 * size / (size + 2) * math.prod(factors)

    return rate


def machine_of(
    rate: Rate,
    clock: FakeClock,
    noise: float = 0.01,
    seed: int = 0,
    *,
    failing: Callable[[Choice], Outcome | None] = lambda choice: None,
    loss: Callable[[str, int], float] = lambda arithmetic, step: 3.0 - 0.01 * step,
) -> FakeMachine:
    """Return a machine that takes three seconds for a window.

    It takes a minute if layers are compiled. A trial that is run again measures the
    same.
    """

    def simulate(trial: Trial) -> Outcome:
        rng = random.Random(f"{seed} {trial.key}")
        choice = choice_of(trial)
        short = trial.measured["min_steps"] == 1
        clock.sleep(3.0 + rng.uniform(0, 0.1) + 57.0 * bool(choice["compile"]))
        failure = failing(choice)
        if failure is not None:
            return failure
        value = rate(choice) * math.exp(rng.gauss(0, noise * (1 + short)))
        losses = []
        if trial.step_arguments.get("losses"):
            arithmetic = arithmetic_words(choice)
            losses = [
                loss(arithmetic, step) for step in range(trial.measured["min_steps"])
            ]
        figures = {
            "units_per_s": value,
            "padded_units_per_s": value,
            "losses": losses,
        }
        return Measured(figures=WINDOW_FIGURES | figures)

    return FakeMachine(simulate)


def exploring(
    directory: Path,
    rate: Rate,
    instead: Callable[[Exploration, Trial], Outcome | None] = lambda search, trial: (
        None
    ),
    *,
    settings: MlmSettings = SETTINGS,
    configurations: tuple[Configuration, ...] = FEW,
    minutes: float = 20.0,
    most_trials: int = 60,
    predict: Callable[[Configuration], StepPrediction] | None = None,
    study_file: Path | None = None,
    **simulated: Any,
) -> Exploration:
    """Return a search that has not begun.

    Its windows count their own non-padding tokens; others are of ``machine_of``.
    """
    clock = FakeClock()
    machine = machine_of(rate, clock, **simulated)
    windows = windows_of(
        settings.window_config,
        budget_s=60 * minutes,
        window_s=2.0,
        trial_timeout_s=600.0,
    )
    request = ExploreRequest(
        settings=settings,
        configurations=configurations,
        windows=StepWindows(settings=settings, windows=windows),
        budget_s=60 * minutes,
        trial_timeout_s=600.0,
        most_trials=most_trials,
        predictor=None if predict is None else StepPredictor(predict=predict),
        study_name="tiny: explore",
        study_file=study_file,
    )
    fake = FakeMachine(lambda trial: instead(search, trial) or machine.run(trial))
    search = Exploration(request=request, runner=runner_on(fake, directory, clock))
    return search


def choice_of(trial: Trial) -> Configuration:
    """Return all settings of a window that a search may vary."""
    return _chosen(trial, [*TRIED_VALUES, "micro_batch_size"])


def configuration_of(trial: Trial) -> Configuration:
    """Return the configuration of a window, with the settings of ``LEVELS``."""
    return _chosen(trial, list(STARTING))


def _chosen(trial: Trial, names: list[str]) -> Configuration:
    config = trial.config
    return Configuration.of({name: config[name] for name in names})


def is_starting(choice: Choice) -> bool:
    """Return whether a choice has the starting configuration's values."""
    return STARTING.items() <= choice.items()


def worth(rate: Rate, choice: Choice) -> float:
    """Return the tokens/s that training has with a choice."""
    return rate(choice) * SETTINGS.useful_share(choice)
