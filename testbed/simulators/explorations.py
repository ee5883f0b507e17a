"""Windows of settings that are computed, and explorations over them.

They are for tests of the search.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from autotune.evidence.explore import KNOBS, Configuration
from autotune.search.decide import knob_space, useful_share
from autotune.search.history import ExploreRequest
from autotune.search.measure import Exploration
from autotune.trials.outcomes import Measured, Outcome
from autotune.trials.values import Trial
from testbed.examples.feeds import runner_on, windows_of
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from trainer.config.train_config import Checkpointing
from trainer.formats.batch_split import Layout

Rate = Callable[[Configuration], float]
"""Real tokens/s of settings, without noise."""
LEVELS = {
    "precision": ("fp32", "bf16"),
    "attention": ("auto",),
    "activation_checkpointing": get_args(Checkpointing),
    "compile": (False, True),
    "layout": ("padded", "bucketed", "packed"),
}
UNEXPLORED = Configuration(
    precision="fp32",
    attention="auto",
    activation_checkpointing="none",
    compile=False,
    layout="packed",
    micro_batch_size=8,
)
GLOBAL_ROWS: dict[Layout, int] = {"packed": 32, "bucketed": 64, "padded": 64}
CELLS = knob_space(UNEXPLORED, LEVELS, GLOBAL_ROWS, 1, lambda knobs: 64)
FEW = tuple(
    cell
    for cell in CELLS
    if not cell.compile
    and cell.activation_checkpointing != "selective"
    and cell.layout != "bucketed"
)


def additive(effects: dict[object, float]) -> Rate:
    """Return rates in which each value of a knob has its factor.

    Micro-batches win less the larger they are.
    """
    return lambda knobs: (
        1000
        * knobs.micro_batch_size
        / (knobs.micro_batch_size + 2)
        * math.prod(effects.get(getattr(knobs, name), 1.0) for name in KNOBS)
    )


def machine_of(
    rate: Rate,
    clock: FakeClock,
    noise: float = 0.01,
    seed: int = 0,
    *,
    failing: Callable[[Configuration], Outcome | None] = lambda knobs: None,
    loss: Callable[[str, int], float] = lambda precision, step: 3.0 - 0.01 * step,
) -> FakeMachine:
    """Return a machine that takes three seconds for a window.

    It takes a minute if layers are compiled. A trial that is run again measures the
    same.
    """

    def simulate(trial: Trial) -> Outcome:
        rng = random.Random(f"{seed} {trial.key}")
        config = trial.config
        knobs = Configuration.of(config)
        short = trial.measured["min_steps"] == 1
        clock.sleep(3.0 + rng.uniform(0, 0.1) + 57.0 * knobs.compile)
        if (failure := failing(knobs)) is not None:
            return failure
        value = rate(knobs) * math.exp(rng.gauss(0, noise * (1 + short)))
        losses = [
            loss(knobs.arithmetic, step) for step in range(trial.measured["min_steps"])
        ]
        losses = losses if trial.step_arguments.get("losses") else []
        return Measured(
            figures=WINDOW_FIGURES
            | {
                "units_per_s": value,
                "padded_units_per_s": value,
                "losses": losses,
            }
        )

    return FakeMachine(simulate)


def exploring(
    place: Path,
    rate: Rate,
    instead: Callable[[Exploration, Trial], Outcome | None] = lambda search, trial: (
        None
    ),
    *,
    cells: tuple[Configuration, ...] = FEW,
    minutes: float = 20.0,
    most_trials: int = 60,
    predict: Callable[[Configuration], dict[str, Any]] | None = None,
    **simulated: Any,
) -> Exploration:
    """Return a search that has not begun.

    Its windows count their own non-padding tokens; others are of ``machine_of``.
    """
    clock = FakeClock()
    machine = machine_of(rate, clock, **simulated)
    request = ExploreRequest(
        training=windows_of(budget_s=60 * minutes, window_s=2.0, trial_timeout_s=600.0),
        cells=cells,
        global_batch_size=GLOBAL_ROWS,
        non_padding_shares=dict.fromkeys(GLOBAL_ROWS),
        most_trials=most_trials,
        left_out=("attention: varlen requires a GPU",),
        predict=predict,
    )
    fake = FakeMachine(lambda trial: instead(search, trial) or machine.run(trial))
    search = Exploration(request=request, runner=runner_on(fake, place, clock))
    return search


def knobs_of(trial: Trial) -> Configuration:
    return Configuration.of(trial.config)


def worth(rate: Rate, knobs: Configuration) -> float:
    return rate(knobs) * useful_share(knobs, GLOBAL_ROWS, 1)
