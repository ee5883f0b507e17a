"""A comparison measures recipes in rounds until their speedups are precise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from autotune.baseline.decide.recipes import Recipe, hf_trainer, paper
from autotune.baseline.measure import (
    BaselineRunner,
    non_padding_share,
    recipes_to_compare,
)
from autotune.baseline.values import RecipeName, SettingDifference
from autotune.errors import OutOfTime, Undecided
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from autotune.trials.runner import Rounds
from testbed.corpora import synthetic_manifest
from testbed.datasets import write_dataset
from testbed.examples.feeds import CONFIG, figures_of, runner_on, windows_of
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from trainer.data.dataset import TokenDataset

TUNED = CONFIG.model_copy(update={"layout": "packed", "micro_batch_size": 16})
RECIPE_BY_LAYOUT: Mapping[str, RecipeName] = {
    "packed": "tuned",
    "dynamic": "hf-trainer",
    "padded": "paper",
}
PADDED_TOKENS_PER_S: Mapping[RecipeName, float] = {
    "tuned": 1000.0,
    "hf-trainer": 800.0,
    "paper": 400.0,
}
NON_PADDING_SHARES: Mapping[RecipeName, float] = {
    "tuned": 1.0,
    "hf-trainer": 0.5,
    "paper": 0.5,
}
WINDOW_SHARE = 0.6
"""Share of non-padding tokens in every simulated window itself."""


def recipe_of(trial) -> RecipeName:
    return RECIPE_BY_LAYOUT[trial.measured["config"]["layout"]]


def steady(name: RecipeName, round_number: int) -> float:
    return 1.0


NOISE_OF_ROUNDS: Mapping[RecipeName, tuple[float, float, float]] = {
    "tuned": (1.3, 0.7, 1.0),
    "hf-trainer": (1.0, 1.3, 0.7),
    "paper": (0.7, 1.0, 1.3),
}
"""Factors on a recipe's speed in three rounds, after which they repeat."""


def noisy(name: RecipeName, round_number: int) -> float:
    """Return a factor that differs so much that no speedup becomes precise."""
    return NOISE_OF_ROUNDS[name][round_number % 3]


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Machine on which each recipe has a speed, and every trial lasts a second."""

    max_micro_batch_size: int = 16
    noise: Callable[[RecipeName, int], float] = steady
    """Factor on the speed of a recipe in a round."""
    failures: Mapping[tuple[RecipeName, int], Outcome] = field(default_factory=dict)
    """Outcome of each window that fails, by its recipe and round."""
    clock: FakeClock = field(default_factory=FakeClock)
    machine: FakeMachine = field(init=False)

    def __post_init__(self):
        self.machine = FakeMachine(self._simulate)

    def _simulate(self, trial) -> Outcome:
        self.clock.sleep(1.0)
        if trial.job == "step":
            size = trial.measured["config"]["micro_batch_size"]
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
            padded_tokens_per_s=tokens_per_s,
            tokens_per_s=WINDOW_SHARE * tokens_per_s,
        )
        return Measured(figures=figures)

    @property
    def windows(self) -> list[tuple[RecipeName, int]]:
        """Recipe and round of each window that was measured."""
        return [
            (recipe_of(trial), trial.measured["round"])
            for trial in self.machine.trials
            if trial.job == "training"
        ]

    @property
    def fit_checks(self) -> list[dict]:
        """Measured input of each check that a micro-batch fits."""
        return [trial.measured for trial in self.machine.trials if trial.job == "step"]


def comparison(
    simulation, directory, *, max_rounds=5, budget_s=600.0
) -> BaselineRunner:
    """Return a comparison on a simulated machine, whose trial log is in a directory."""
    recipes = (
        Recipe(name="tuned", config=TUNED, because={}),
        hf_trainer(TUNED, 4096),
        paper(TUNED, 4096, 8, "CPUs"),
    )
    trial_runner = runner_on(simulation.machine, directory, simulation.clock)
    return BaselineRunner(
        training=windows_of(TUNED, budget_s=budget_s),
        max_rounds=max_rounds,
        memory_budget_bytes=2**30,
        gradient_accumulation_steps=2,
        recipes={recipe.name: recipe for recipe in recipes},
        non_padding_shares=dict(NON_PADDING_SHARES),
        manifest=synthetic_manifest(64),
        windows=Rounds(runner=trial_runner),
    )


def rows_by_name(evidence) -> dict:
    return {row.name: row for row in evidence.rows}


def test_speedups_compare_windows_of_one_round(tmp_path):
    drifting = Simulation(noise=lambda name, round_number: 1 + 0.1 * round_number)
    evidence = comparison(drifting, tmp_path).run()
    outcomes = [(row.name, row.outcome) for row in evidence.rows]
    assert outcomes == [("paper", "ran"), ("hf-trainer", "ran"), ("tuned", "ran")]
    # Ratios of non-padding tokens/s, which the drift of all recipes does not change.
    assert [row.speedup for row in evidence.rows] == [
        pytest.approx(1000 / (400 * 0.5)),
        pytest.approx(1000 / (800 * 0.5)),
        1.0,
    ]
    assert rows_by_name(evidence)["hf-trainer"].tokens_per_s == pytest.approx(
        [400.0, 440.0, 480.0]
    )


def test_every_other_round_runs_backwards(tmp_path):
    simulation = Simulation()
    evidence = comparison(simulation, tmp_path).run()
    forwards = ["tuned", "hf-trainer", "paper"]
    assert [name for name, _ in simulation.windows] == [
        *forwards,
        *reversed(forwards),
        *forwards,
    ]
    assert evidence.windows == 9
    assert evidence.seconds == 11.0  # nine windows, and two checks that they fit


def test_two_rounds_give_no_interval(tmp_path):
    evidence = comparison(Simulation(), tmp_path, max_rounds=2).run()
    row = rows_by_name(evidence)["hf-trainer"]
    assert row.speedup == pytest.approx(1000 / (800 * 0.5))
    assert row.speedup_low is None
    assert row.speedup_high is None


@pytest.mark.parametrize(
    ("max_rounds", "budget_s", "rounds"),
    [
        pytest.param(7, 600.0, 7, id="until the most rounds"),
        pytest.param(9, 1.0, 3, id="three rounds beyond the budget"),
        # Two checks that they fit and four rounds of three windows: 14 seconds.
        pytest.param(9, 12.0, 4, id="until the budget is spent"),
    ],
)
def test_noise_takes_more_rounds(tmp_path, max_rounds, budget_s, rounds):
    noisy_machine = Simulation(noise=noisy)
    evidence = comparison(
        noisy_machine, tmp_path, max_rounds=max_rounds, budget_s=budget_s
    ).run()
    assert evidence.windows == 3 * rounds


def run_until(directory, windows_s):
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
    # Transformers' 8 are halved once, the paper's 16 twice.
    simulation = Simulation(max_micro_batch_size=5)
    rows = rows_by_name(comparison(simulation, tmp_path).run())
    smaller = SettingDifference(
        key="micro_batch_size", theirs=4, tuned=16, reason="8 does not fit 1 GiB"
    )
    assert smaller in rows["paper"].differences
    assert smaller in rows["hf-trainer"].differences
    sizes = [step["config"]["micro_batch_size"] for step in simulation.fit_checks]
    assert sizes == [8, 4, 16, 8, 4]


def test_checks_fit_under_the_budget(tmp_path):
    simulation = Simulation()
    comparison(simulation, tmp_path).run()
    assert len(simulation.fit_checks) == 2
    for step in simulation.fit_checks:
        assert step["memory_budget_bytes"] == 2**30
        assert step["config"]["global_batch_tokens"] is None


def test_reports_recipe_that_never_fits(tmp_path):
    evidence = comparison(Simulation(max_micro_batch_size=0), tmp_path).run()
    rows = rows_by_name(evidence)
    for name in ("hf-trainer", "paper"):
        assert rows[name].outcome == "out of memory even with one sequence"
    assert rows["hf-trainer"].speedup is None
    assert rows["hf-trainer"].tokens_per_s == []
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
    simulation = Simulation(failures={("hf-trainer", 1): failure(detail="")})
    rows = rows_by_name(comparison(simulation, tmp_path).run())
    assert rows["hf-trainer"].outcome == f"{description} in round 2"
    assert len(rows["hf-trainer"].tokens_per_s) == 1
    assert len(rows["paper"].tokens_per_s) == 3
    # Only a contaminated window is worth further attempts.
    attempts = 3 if failure is Contaminated else 1
    assert simulation.windows.count(("hf-trainer", 1)) == attempts


def test_failed_tuned_settings_leave_it_undecided(tmp_path):
    simulation = Simulation(failures={("tuned", 0): Crashed(detail="why")})
    with pytest.raises(Undecided, match="why"):
        comparison(simulation, tmp_path).run()


def test_trimmed_window_counts_its_own_tokens(tmp_path):
    runner = comparison(Simulation(), tmp_path)
    runner.non_padding_shares["hf-trainer"] = None
    row = rows_by_name(runner.run())["hf-trainer"]
    assert row.tokens_per_s == pytest.approx([WINDOW_SHARE * 800.0] * 3)


SHORT = TUNED.model_copy(update={"seq_length_tokens": 16, "global_batch_size": 10})


@pytest.fixture
def dataset(tmp_path):
    """Samples of 8 tokens, two of which fill one of ``SHORT``'s sequences."""
    directory = write_dataset(tmp_path / "data", [[5] * 6] * 100, vocab_size=128)
    return TokenDataset.open(directory)


def global_batches(tuned, dataset):
    recipes = recipes_to_compare(tuned, dataset, 2, "2 CPUs")
    return {name: recipe.config.global_batch_tokens for name, recipe in recipes.items()}


def test_baselines_get_the_global_batch_in_tokens(dataset):
    assert global_batches(SHORT, dataset) == {
        "tuned": None,
        "hf-trainer": 10 * 16,
        "paper": 10 * 16,
    }


def test_baselines_keep_a_global_batch_in_tokens(dataset):
    in_tokens = SHORT.model_copy(update={"global_batch_tokens": 77})
    assert global_batches(in_tokens, dataset)["hf-trainer"] == 77


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        pytest.param("packed", pytest.approx(1.0), id="packed"),
        pytest.param("padded", pytest.approx(0.5), id="padded"),
        pytest.param("dynamic", None, id="trimmed, dynamic"),
        pytest.param("bucketed", None, id="trimmed, bucketed"),
    ],
)
def test_share_is_known_unless_sequences_are_trimmed(dataset, layout, share):
    config = SHORT.model_copy(update={"layout": layout})
    assert non_padding_share(config, dataset) == share
