import pytest

from autotune.baseline.decide.recipes import Recipe, hf_trainer, paper
from autotune.baseline.measure import BaselineRunner, compare_with
from autotune.baseline.values import SettingDifference
from autotune.errors import OutOfTime, Undecided
from autotune.trials.runner import Rounds
from autotune.trials.values import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
)
from testbed.corpora import synthetic_manifest
from testbed.datasets import write_dataset
from testbed.examples.feeds import CONFIG, figures_of, runner_on, windows_of
from testbed.examples.trials import STEP_FIGURES
from testbed.fakes import FakeClock, FakeMachine
from trainer.data.dataset import TokenDataset

TUNED = CONFIG.model_copy(update={"layout": "packed", "micro_batch_size": 16})
SPEEDS = {"tuned": 1000.0, "hf-trainer": 800.0, "paper": 400.0}
SHARES = {"tuned": 1.0, "hf-trainer": 0.5, "paper": 0.5}


def name_of(trial) -> str:
    return {"padded": "paper", "packed": "tuned", "dynamic": "hf-trainer"}[
        trial.measured["config"]["layout"]
    ]


class Trained(FakeMachine):
    """A machine with a speed for each recipe, on which so many sequences fit."""

    def __init__(self, *, fits=16, noise=lambda name, number: 1.0, fate=None) -> None:
        self.clock = FakeClock()

        def simulate(trial):
            self.clock.sleep(1.0)
            name = name_of(trial)
            if trial.job == "step":
                too_many = trial.measured["config"]["micro_batch_size"] > fits
                return (
                    OutOfMemory(detail="")
                    if too_many
                    else Measured(figures=STEP_FIGURES)
                )
            if (
                fate is not None
                and (outcome := fate(name, trial.measured["round"])) is not None
            ):
                return outcome
            speed = SPEEDS[name] * noise(name, trial.measured["round"])
            figures = figures_of(
                trial,
                lambda _: 1.0,
                padded_tokens_per_s=speed,
                tokens_per_s=0.6 * speed,
            )
            return Measured(figures=figures)

        super().__init__(simulate)

    @property
    def windows(self) -> list[tuple[str, int]]:
        return [
            (name_of(trial), trial.measured["round"])
            for trial in self.trials
            if trial.job == "training"
        ]


def comparison(machine, directory, *, rounds=5, budget_s=600.0) -> BaselineRunner:
    recipes = (
        Recipe(name="tuned", config=TUNED, because={}),
        hf_trainer(TUNED, 4096),
        paper(TUNED, 4096, 8, "CPUs"),
    )
    return BaselineRunner(
        training=windows_of(TUNED, budget_s=budget_s),
        most_rounds=rounds,
        memory_budget_bytes=2**30,
        micro_batches=2,
        recipes={recipe.name: recipe for recipe in recipes},
        non_padding_shares=dict(SHARES),
        manifest=synthetic_manifest(64),
        reading=Rounds(runner=runner_on(machine, directory, machine.clock)),
    )


def rows_by_name(evidence) -> dict:
    return {row.name: row for row in evidence.rows}


def test_ratios_come_from_the_same_round(tmp_path):
    machine = Trained(noise=lambda name, number: 1 + 0.1 * number)
    evidence = comparison(machine, tmp_path).run()
    outcomes = [(row.name, row.outcome) for row in evidence.rows]
    assert outcomes == [("paper", "ran"), ("hf-trainer", "ran"), ("tuned", "ran")]
    assert [row.speedup for row in evidence.rows] == [
        pytest.approx(1 / (0.4 * 0.5)),
        pytest.approx(1 / (0.8 * 0.5)),
        1.0,
    ]
    assert rows_by_name(evidence)["hf-trainer"].tokens_per_s == pytest.approx(
        [400.0, 440.0, 480.0]
    )
    assert (evidence.windows, evidence.seconds) == (9, 11.0)
    forwards = ["tuned", "hf-trainer", "paper"]
    assert [name for name, _ in machine.windows] == [
        *forwards,
        *reversed(forwards),
        *forwards,
    ]


def test_two_rounds_give_no_interval(tmp_path):
    row = rows_by_name(comparison(Trained(), tmp_path / "two", rounds=2).run())[
        "hf-trainer"
    ]
    assert (row.speedup, row.speedup_low, row.speedup_high) == (
        pytest.approx(1 / 0.4),
        None,
        None,
    )


@pytest.mark.parametrize(
    ("rounds", "budget_s", "windows"), [(7, 600.0, 21), (9, 1.0, 9), (9, 12.0, 12)]
)
def test_noise_takes_more_rounds(tmp_path, rounds, budget_s, windows):
    machine = Trained(
        noise=lambda name, number: 1 + 0.3 * ((7 * number + len(name)) % 3 - 1)
    )
    assert (
        comparison(machine, tmp_path, rounds=rounds, budget_s=budget_s).run().windows
        == windows
    )


def test_ends_early_after_three_rounds(tmp_path):
    def ends(seconds):
        machine = Trained(
            noise=lambda name, number: 1 + 0.3 * ((7 * number + len(name)) % 3 - 1)
        )
        runner = comparison(machine, tmp_path / str(seconds), rounds=9)
        runner.reading.runner.budget_ends_s = (
            machine.clock.utc_now().timestamp() + seconds
        )
        return runner.run()

    assert ends(2 + 13.5).windows == 12  # two trials before tell what fits
    with pytest.raises(OutOfTime):
        ends(2 + 8.5)


def test_halves_micro_batch_until_it_fits(tmp_path):
    machine = Trained(fits=5)
    rows = rows_by_name(comparison(machine, tmp_path).run())
    smaller = SettingDifference(
        key="micro_batch_size", theirs=4, tuned=16, reason="8 does not fit 1 GiB"
    )
    assert all(smaller in rows[name].differences for name in ("paper", "hf-trainer"))
    steps = [trial.measured for trial in machine.trials if trial.job == "step"]
    assert [step["config"]["micro_batch_size"] for step in steps] == [8, 4, 16, 8, 4]
    assert {
        (step["memory_budget_bytes"], step["config"]["global_batch_tokens"])
        for step in steps
    } == {(2**30, None)}


def test_reports_recipe_that_never_fits(tmp_path):
    evidence = comparison(Trained(fits=0), tmp_path).run()
    rows = rows_by_name(evidence)
    assert (
        rows["hf-trainer"].outcome
        == rows["paper"].outcome
        == "out of memory even with one sequence"
    )
    assert (rows["hf-trainer"].speedup, rows["hf-trainer"].tokens_per_s) == (None, [])
    assert (rows["tuned"].outcome, evidence.windows) == ("ran", 1)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (OutOfMemory, "out of memory"),
        (HostOutOfMemory, "killed: host out of memory"),
        (TimedOut, "timed out"),
        (Crashed, "crashed"),
        (Contaminated, "contaminated"),
    ],
)
def test_failed_recipe_leaves_the_others_running(tmp_path, kind, outcome):
    machine = Trained(
        fate=lambda name, number: (
            kind(detail="") if (name, number) == ("hf-trainer", 1) else None
        )
    )
    rows = rows_by_name(comparison(machine, tmp_path).run())
    assert rows["hf-trainer"].outcome == f"{outcome} in round 2"
    assert [len(rows[name].tokens_per_s) for name in ("hf-trainer", "paper")] == [1, 3]
    assert machine.windows.count(("hf-trainer", 1)) == (
        3 if kind is Contaminated else 1
    )


def test_failed_tuned_settings_leave_it_undecided(tmp_path):
    machine = Trained(
        fate=lambda name, number: Crashed(detail="why") if name == "tuned" else None
    )
    with pytest.raises(Undecided, match="why"):
        comparison(machine, tmp_path).run()


def test_trimmed_sequences_have_no_known_share(tmp_path):
    runner = comparison(Trained(), tmp_path)
    runner.non_padding_shares["hf-trainer"] = None
    assert rows_by_name(runner.run())["hf-trainer"].tokens_per_s == pytest.approx(
        [480.0] * 3
    )


def test_baselines_get_the_global_batch_in_tokens(tmp_path):
    dataset = TokenDataset.open(
        write_dataset(tmp_path / "data", [[5] * 6] * 100, vocab_size=128)
    )
    tuned = TUNED.model_copy(update={"seq_length_tokens": 16, "global_batch_size": 10})
    recipes, shares = compare_with(tuned, dataset, 2, "2 CPUs")
    assert [
        recipes[name].config.global_batch_tokens
        for name in ("tuned", "hf-trainer", "paper")
    ] == [None, 160, 160]
    assert shares == {
        "tuned": pytest.approx(1.0),
        "hf-trainer": None,
        "paper": pytest.approx(0.5),
    }
    bucketed = tuned.model_copy(
        update={"layout": "bucketed", "global_batch_tokens": 77}
    )
    recipes, shares = compare_with(bucketed, dataset, 2, "2 CPUs")
    assert (recipes["hf-trainer"].config.global_batch_tokens, shares["tuned"]) == (
        77,
        None,
    )
