"""Windows of splits are measured in rounds, until the promise is precise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autotune.base.defaults import CONFIRM_ROUNDS
from autotune.confirm.measure import SplitRunner
from autotune.errors import OutOfTime, Undecided
from autotune.evidence.probe import CurvePoint
from autotune.subjects.mlm.confirm.training import MlmTraining
from autotune.trials.outcomes import Crashed, Measured, Outcome
from autotune.trials.rounds import Rounds
from testbed.examples.feeds import CONFIG, figures_of, runner_on, windows_of
from testbed.examples.profiles import example_profile
from testbed.fakes import FakeClock, FakeMachine

SEQ_LENGTH_TOKENS = 512
FILL_SHARE = 0.9
"""Share of non-padding tokens in a sequence."""
CHOSEN_SIZE = 343
RIVAL_SIZE = 206
GLOBAL_BATCH_SIZE = 1028
"""Sequences of a step: three micro-batches of 343, with an empty sequence, or five of
206, with two."""


def steady(round_number: int) -> float:
    """Return the factor of a machine with noise of a thousandth."""
    return 1 + 0.001 * (round_number % 3)


def noisy(round_number: int) -> float:
    """Return a factor that varies too much for a precise promise."""
    return 1 + 0.1 * (round_number % 3)


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Machine on which each size has a speed, and every window lasts a second."""

    padded_tokens_per_s: Mapping[int, float]
    """Speed by micro-batch size."""
    noise: Callable[[int], float] = steady
    failures: Mapping[tuple[int, int], Outcome] = field(default_factory=dict)
    """Outcome of each window that fails, by its size and round."""
    clock: FakeClock = field(default_factory=FakeClock)
    machine: FakeMachine = field(init=False)

    def __post_init__(self):
        self.machine = FakeMachine(self._simulate)

    def _simulate(self, trial) -> Outcome:
        self.clock.sleep(1.0)
        size, round_number = window_of(trial)
        if (size, round_number) in self.failures:
            return self.failures[size, round_number]
        rate = self.padded_tokens_per_s[size] * self.noise(round_number)
        figures = figures_of(trial, lambda _: 1.0, padded_units_per_s=rate)
        return Measured(figures=figures)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Micro-batch size and round of each window."""
        return [window_of(trial) for trial in self.machine.trials]


def window_of(trial) -> tuple[int, int]:
    """Return the micro-batch size and the round of a window."""
    return trial.config["micro_batch_size"], trial.measured["round"]


def runner_of(simulation: Simulation, directory: Path, budget_s=600.0) -> SplitRunner:
    """Return a measurement of the simulated sizes, the chosen one first."""
    curve = [
        CurvePoint(
            size=size,
            units_per_s=rate,
            step_s=SEQ_LENGTH_TOKENS * size / rate,
            timed_steps=4,
        )
        for size, rate in simulation.padded_tokens_per_s.items()
    ]
    probe = example_profile().evidence.probe.model_copy(
        update={
            "curve": curve,
            "mean_tokens_per_sequence": FILL_SHARE * SEQ_LENGTH_TOKENS,
        }
    )
    config = CONFIG.model_copy(
        update={
            "micro_batch_size": CHOSEN_SIZE,
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "seq_length_tokens": SEQ_LENGTH_TOKENS,
        }
    )
    return SplitRunner(
        training=MlmTraining(
            bench=None,
            stored=None,
            probe=probe,
            sizes=list(simulation.padded_tokens_per_s),
            windows=windows_of(config, budget_s=budget_s),
        ),
        budget_s=budget_s,
        windows=Rounds(
            runner=runner_on(simulation.machine, directory, simulation.clock)
        ),
        max_rounds=CONFIRM_ROUNDS,
    )


def test_chosen_split_is_measured_in_three_processes(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e5})
    runner = runner_of(simulation, tmp_path)
    assert runner.run() == CHOSEN_SIZE
    assert simulation.windows == [(CHOSEN_SIZE, number) for number in range(3)]


def test_windows_have_the_micro_batches_of_training(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e6, RIVAL_SIZE: 1e6})
    runner_of(simulation, tmp_path).run()
    limits = {
        window_of(trial)[0]: trial.loader_arguments["most_micro_batches"]
        for trial in simulation.machine.trials
    }
    assert limits == {CHOSEN_SIZE: 3, RIVAL_SIZE: 5}


def test_empty_sequences_and_padding_do_not_count(tmp_path):
    simulation = Simulation(
        padded_tokens_per_s={CHOSEN_SIZE: 1e5}, noise=lambda number: 1.0
    )
    runner = runner_of(simulation, tmp_path)
    size = runner.run()
    rate = 1e5 * FILL_SHARE * GLOBAL_BATCH_SIZE / (3 * CHOSEN_SIZE)
    assert runner.promised(size).value == pytest.approx(rate)


def test_faster_rival_replaces_the_choice(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e5, RIVAL_SIZE: 1.1e5})
    runner = runner_of(simulation, tmp_path)
    used_size = runner.run()
    assert used_size == RIVAL_SIZE
    sizes = [row.micro_batch_size for row in runner.rows(used_size)]
    assert sizes == [RIVAL_SIZE, CHOSEN_SIZE]


def test_rival_that_fails_drops_out(tmp_path):
    simulation = Simulation(
        padded_tokens_per_s={CHOSEN_SIZE: 1e5, RIVAL_SIZE: 1.1e5},
        failures={(RIVAL_SIZE, 1): Crashed(detail="a bus error")},
    )
    runner = runner_of(simulation, tmp_path)
    assert runner.run() == CHOSEN_SIZE
    assert (RIVAL_SIZE, 2) not in simulation.windows


def test_failure_of_the_choice_ends_the_phase(tmp_path):
    simulation = Simulation(
        padded_tokens_per_s={CHOSEN_SIZE: 1e5},
        failures={(CHOSEN_SIZE, 0): Crashed(detail="a bus error")},
    )
    with pytest.raises(Undecided, match="micro-batch 343"):
        runner_of(simulation, tmp_path).run()


def test_noise_takes_all_rounds(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e5}, noise=noisy)
    runner_of(simulation, tmp_path).run()
    assert len(simulation.windows) == CONFIRM_ROUNDS


def test_budget_ends_noisy_rounds(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e5}, noise=noisy)
    runner_of(simulation, tmp_path, budget_s=4.5).run()
    assert len(simulation.windows) == 5


def test_no_time_for_three_rounds_is_no_promise(tmp_path):
    simulation = Simulation(padded_tokens_per_s={CHOSEN_SIZE: 1e5})
    runner = runner_of(simulation, tmp_path)
    now_s = simulation.clock.utc_now().timestamp()
    runner.windows.runner.budget_ends_s = now_s + 2.5
    with pytest.raises(OutOfTime):
        runner.run()
