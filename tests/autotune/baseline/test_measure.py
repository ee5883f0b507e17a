"""A comparison measures contenders in rounds until their speedups are precise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.baseline.contender import Contender
from autotune.baseline.measure import BaselineRunner
from autotune.errors import BadInput, OutOfTime, Undecided
from autotune.evidence.baseline import (
    BaselineEvidence,
    BaselineRow,
    SettingDifference,
)
from autotune.subjects.baseline import Baseline
from autotune.subjects.mlm.baselines.recipes import differences, padded, untuned
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from autotune.trials.rounds import ATTEMPTS, Rounds
from testbed.examples.feeds import CONFIG, figures_of, runner_on, windows_of
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine

TUNED = CONFIG.model_copy(update={"layout": "packed", "micro_batch_size": 16})
RECIPE_BY_LAYOUT: Mapping[str, str] = {
    "packed": "tuned",
    "dynamic": "untuned",
    "padded": "padded",
}
PADDED_TOKENS_PER_S: Mapping[str, float] = {
    "tuned": 1000.0,
    "untuned": 800.0,
    "padded": 400.0,
}
NON_PADDING_SHARES: Mapping[str, float] = {
    "tuned": 1.0,
    "untuned": 0.5,
    "padded": 0.5,
}
WINDOW_SHARE = 0.6
"""Share of non-padding tokens in every simulated window itself."""


def average_rate(name: str) -> float:
    """Return the non-padding tokens/s of a recipe on average."""
    return PADDED_TOKENS_PER_S[name] * NON_PADDING_SHARES[name]


def recipe_of(trial) -> str:
    """Return the recipe of a trial, which its layout tells."""
    return RECIPE_BY_LAYOUT[trial.config["layout"]]


def steady(name: str, round_number: int) -> float:
    """Return the factor of a machine without noise."""
    return 1.0


def drifting(name: str, round_number: int) -> float:
    """Return a factor that grows from round to round, for all recipes alike."""
    return 1 + 0.1 * round_number


NOISE_OF_ROUNDS: Mapping[str, tuple[float, float, float]] = {
    "tuned": (1.3, 0.7, 1.0),
    "untuned": (1.0, 1.3, 0.7),
    "padded": (0.7, 1.0, 1.3),
}
"""Factors on a recipe's speed in three rounds, after which they repeat."""


def noisy(name: str, round_number: int) -> float:
    """Return a factor that differs so much that no speedup becomes precise."""
    return NOISE_OF_ROUNDS[name][round_number % 3]


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Machine on which each recipe has a speed, and every trial lasts a second."""

    max_micro_batch_size: int = 16
    """Largest micro-batch that fits its memory."""
    noise: Callable[[str, int], float] = steady
    """Factor on the speed of a recipe in a round."""
    failures: Mapping[tuple[str, int], Outcome] = field(default_factory=dict)
    """Outcome of each window that fails, by its recipe and round."""
    other_units: Mapping[str, float] = field(default_factory=dict)
    """Rates in further units, of every window."""
    unit_of: Mapping[str, str] = field(default_factory=dict)
    """Unit of each recipe whose windows do not count tokens."""
    clock: FakeClock = field(default_factory=FakeClock)
    machine: FakeMachine = field(init=False)

    def __post_init__(self):
        self.machine = FakeMachine(self._simulate)

    def _simulate(self, trial) -> Outcome:
        self.clock.sleep(1.0)
        if trial.job == "step":
            size = trial.measured["size"]
            if size > self.max_micro_batch_size:
                return OutOfMemory(detail="")
            return Measured(figures=STEP_FIGURES)
        return self._train(trial)

    def _train(self, trial) -> Outcome:
        name = recipe_of(trial)
        round_number = trial.measured["round"]
        if (name, round_number) in self.failures:
            return self.failures[name, round_number]
        tokens_per_s = PADDED_TOKENS_PER_S[name] * self.noise(name, round_number)
        figures = figures_of(
            trial,
            lambda _: 1.0,
            padded_units_per_s=tokens_per_s,
            units_per_s=WINDOW_SHARE * tokens_per_s,
            unit=self.unit_of.get(name, "tokens"),
            other_units_per_s=dict(self.other_units),
        )
        return Measured(figures=figures)

    @property
    def windows(self) -> list[tuple[str, int]]:
        """Recipe and round of each window that was measured."""
        return [
            (recipe_of(trial), trial.measured["round"])
            for trial in self.machine.trials
            if trial.job == "window"
        ]

    @property
    def fit_checks(self) -> list[dict]:
        """Measured input of each check that a micro-batch fits."""
        return [trial.measured for trial in self.machine.trials if trial.job == "step"]


GLOBAL_BATCH_TOKENS = 4096
MEMORY_BUDGET_BYTES = 2**30


def comparison(
    simulation: Simulation,
    directory: Path,
    *,
    max_rounds: int = 5,
    budget_s: float = 600.0,
) -> BaselineRunner:
    """Return a comparison on a simulated machine, whose trial log is in a directory."""
    windows = windows_of(TUNED, budget_s=budget_s)
    recipes = (
        untuned(TUNED, GLOBAL_BATCH_TOKENS),
        padded(TUNED, GLOBAL_BATCH_TOKENS, max_workers=8, limit="CPUs"),
    )
    baselines = [
        Baseline(
            name="tuned",
            subject=windows.subject,
            non_padding_share=NON_PADDING_SHARES["tuned"],
        ),
        *(
            Baseline(
                name=recipe.name,
                subject=windows.subject.model_copy(update={"config": recipe.config}),
                choice={"micro_batch_size": recipe.config.micro_batch_size},
                differences=differences(recipe, TUNED, local_ranks=1),
                non_padding_share=NON_PADDING_SHARES[recipe.name],
                fit_choice={"global_batch_tokens": None, "micro_batches": 2},
            )
            for recipe in recipes
        ),
    ]
    trial_runner = runner_on(simulation.machine, directory, simulation.clock)
    return BaselineRunner(
        contenders={
            baseline.name: Contender(baseline=baseline, windows=windows)
            for baseline in baselines
        },
        request=windows.request,
        local_ranks=1,
        max_rounds=max_rounds,
        memory_budget_bytes=MEMORY_BUDGET_BYTES,
        windows=Rounds(runner=trial_runner),
    )


def rows_by_name(evidence: BaselineEvidence) -> dict[str, BaselineRow]:
    return {row.name: row for row in evidence.rows}


def test_evidence_has_all_recipes_tuned_one_last(tmp_path):
    evidence = comparison(Simulation(), tmp_path).run()
    outcomes = [(row.name, row.outcome) for row in evidence.rows]
    assert outcomes == [("padded", "ran"), ("untuned", "ran"), ("tuned", "ran")]


def test_speedups_compare_windows_of_one_round(tmp_path):
    evidence = comparison(Simulation(noise=drifting), tmp_path).run()
    rows = rows_by_name(evidence)
    # Ratios of non-padding tokens/s, which the drift of all recipes does not change.
    for name in ("padded", "untuned"):
        speedup = average_rate("tuned") / average_rate(name)
        assert rows[name].speedup == pytest.approx(speedup)
    assert rows["tuned"].speedup == 1.0


def test_rates_are_of_non_padding_tokens(tmp_path):
    evidence = comparison(Simulation(noise=drifting), tmp_path).run()
    rate = average_rate("untuned")
    assert rows_by_name(evidence)["untuned"].units_per_s == pytest.approx(
        [rate, 1.1 * rate, 1.2 * rate]
    )


def test_every_other_round_runs_backwards(tmp_path):
    simulation = Simulation()
    evidence = comparison(simulation, tmp_path).run()
    forwards = ["tuned", "untuned", "padded"]
    assert [name for name, _ in simulation.windows] == [
        *forwards,
        *reversed(forwards),
        *forwards,
    ]
    windows = 3 * 3
    fit_checks = 2
    assert evidence.windows == windows
    # Every trial lasts a second.
    assert evidence.seconds == windows + fit_checks


def test_two_rounds_give_no_interval(tmp_path):
    evidence = comparison(Simulation(), tmp_path, max_rounds=2).run()
    row = rows_by_name(evidence)["untuned"]
    assert row.speedup == pytest.approx(average_rate("tuned") / average_rate("untuned"))
    assert row.speedup_low is None
    assert row.speedup_high is None


def rounds_of_noise(directory, *, max_rounds, budget_s) -> float:
    """Return how many rounds a comparison takes whose noise decides nothing."""
    noisy_comparison = comparison(
        Simulation(noise=noisy), directory, max_rounds=max_rounds, budget_s=budget_s
    )
    return noisy_comparison.run().windows / len(RECIPE_BY_LAYOUT)


def test_noise_takes_all_rounds(tmp_path):
    assert rounds_of_noise(tmp_path, max_rounds=7, budget_s=600.0) == 7


def test_small_budget_still_measures_three_rounds(tmp_path):
    assert rounds_of_noise(tmp_path, max_rounds=9, budget_s=1.0) == 3


def test_budget_ends_a_noisy_comparison(tmp_path):
    # The fourth round begins after two checks of fit and nine windows, 11 seconds. It
    # is completed, and the fifth would begin after 14 seconds.
    assert rounds_of_noise(tmp_path, max_rounds=9, budget_s=12.0) == 4


def run_until(directory, *, windows_s) -> BaselineEvidence:
    """Run a noisy comparison whose deadline leaves this time for windows."""
    noisy_machine = Simulation(noise=noisy)
    runner = comparison(noisy_machine, directory, max_rounds=9)
    fit_checks_s = 2.0  # a second for each baseline
    ends_s = noisy_machine.clock.utc_now().timestamp() + fit_checks_s + windows_s
    runner.windows.runner.budget_ends_s = ends_s
    return runner.run()


def test_deadline_ends_comparison_after_whole_rounds(tmp_path):
    # Four rounds of three windows, each of a second; a fifth does not fit.
    assert run_until(tmp_path, windows_s=13.5).windows == 12


def test_deadline_before_three_rounds_is_too_early(tmp_path):
    # Three rounds need nine seconds.
    with pytest.raises(OutOfTime):
        run_until(tmp_path, windows_s=8.5)


def test_halves_micro_batch_until_it_fits(tmp_path):
    # Transformers' 8 sequences are halved once, the paper's 16 twice.
    simulation = Simulation(max_micro_batch_size=5)
    rows = rows_by_name(comparison(simulation, tmp_path).run())
    smaller = SettingDifference(
        key="micro_batch_size", theirs=4, tuned=16, reason="8 does not fit 1 GiB"
    )
    for name in ("padded", "untuned"):
        assert smaller in rows[name].differences
    sizes = [step["size"] for step in simulation.fit_checks]
    assert sizes == [8, 4, 16, 8, 4]


def test_checks_fit_under_the_budget(tmp_path):
    simulation = Simulation()
    comparison(simulation, tmp_path).run()
    assert len(simulation.fit_checks) == 2
    for step in simulation.fit_checks:
        assert step["memory_budget_bytes"] == MEMORY_BUDGET_BYTES
        assert step["arguments"]["config"]["global_batch_tokens"] is None


def test_reports_recipe_that_never_fits(tmp_path):
    evidence = comparison(Simulation(max_micro_batch_size=0), tmp_path).run()
    rows = rows_by_name(evidence)
    for name in ("untuned", "padded"):
        assert rows[name].outcome == "out of memory even with one sequence"
        assert rows[name].speedup is None
        assert rows[name].units_per_s == []
    # One window of the tuned settings, whose rate is shown anyway.
    assert rows["tuned"].outcome == "ran"
    assert evidence.windows == 1


@pytest.mark.parametrize(
    ("failure", "description"),
    [
        pytest.param(OutOfMemory, "out of memory", id="out of memory"),
        pytest.param(HostOutOfMemory, "killed: host out of memory", id="host"),
        pytest.param(TimedOut, "timed out", id="timed out"),
        pytest.param(Crashed, "crashed", id="crashed"),
        pytest.param(Contaminated, "contaminated", id="contaminated"),
    ],
)
def test_failed_recipe_leaves_the_others_running(tmp_path, failure, description):
    simulation = Simulation(failures={("untuned", 1): failure(detail="")})
    rows = rows_by_name(comparison(simulation, tmp_path).run())
    assert rows["untuned"].outcome == f"{description} in round 2"
    assert len(rows["untuned"].units_per_s) == 1
    assert len(rows["padded"].units_per_s) == 3
    # Only a contaminated window is worth further attempts.
    attempts = ATTEMPTS if failure is Contaminated else 1
    assert simulation.windows.count(("untuned", 1)) == attempts


def test_failed_tuned_settings_leave_it_undecided(tmp_path):
    simulation = Simulation(failures={("tuned", 0): Crashed(detail="why")})
    with pytest.raises(Undecided, match="why"):
        comparison(simulation, tmp_path).run()


def test_trimmed_window_counts_its_own_tokens(tmp_path):
    runner = comparison(Simulation(), tmp_path)
    contender = runner.contenders["untuned"]
    runner.contenders["untuned"] = replace(
        contender, baseline=replace(contender.baseline, non_padding_share=None)
    )
    row = rows_by_name(runner.run())["untuned"]
    rate = WINDOW_SHARE * PADDED_TOKENS_PER_S["untuned"]
    assert row.units_per_s == pytest.approx([rate, rate, rate])


def test_compares_in_the_unit_that_all_count(tmp_path):
    runner = comparison(Simulation(other_units={"samples": 7.0}), tmp_path)
    assert runner.run().unit == "tokens"
    only_samples = comparison(
        Simulation(other_units={"samples": 7.0}, unit_of={"untuned": "batches"}),
        tmp_path / "again",
    )
    evidence = only_samples.run()
    assert evidence.unit == "samples"
    assert rows_by_name(evidence)["tuned"].units_per_s == [7.0] * 3


def test_rejects_subjects_without_a_common_unit(tmp_path):
    simulation = Simulation(unit_of={"untuned": "images"})
    with pytest.raises(BadInput, match="untuned counts images") as raised:
        comparison(simulation, tmp_path).run()
    assert "--per-size" in raised.value.next_step
    # One round shows it.
    assert len(simulation.windows) == 3


def test_batches_count_as_many_units_as_their_size(tmp_path):
    runner = comparison(Simulation(unit_of={"untuned": "batches"}), tmp_path)
    contender = runner.contenders["untuned"]
    runner.contenders["untuned"] = replace(contender, units_per_batch_of_size=16.0)
    row = rows_by_name(runner.run())["untuned"]
    rate = WINDOW_SHARE * PADDED_TOKENS_PER_S["untuned"]
    # The untuned micro-batch has 8 sequences.
    assert row.units_per_s == pytest.approx([8 * 16 * rate] * 3)
