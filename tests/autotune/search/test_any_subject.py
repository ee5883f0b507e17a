"""A search over the settings of a subject that is not the bundled trainer."""

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.search.explore_evidence import explore_evidence
from autotune.search.measure import Exploration
from autotune.search.request import subject_request
from autotune.search.verification import FEWEST_ROUNDS, confirm
from autotune.subjects.subject import Call, Setting, Size
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.windows import SubjectWindows
from testbed.examples.feeds import LIMITS, runner_on
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeMachine

SETTINGS = (
    Setting(name="amp", values=(False, True), changes_rounding=True),
    Setting(name="compile", values=(False, True)),
    Setting(name="memory_format", values=("contiguous", "channels_last")),
    Setting(name="optimizer", values=("adam", "sgd"), changes_recipe=True),
)
LARGEST_SIZE = 64
FITS = 32


@dataclass(frozen=True)
class ImageSubject:
    """A step on images, as a stranger may write it."""

    kind: ClassVar[str] = "images"
    size: ClassVar[Size] = Size(name="batch_size", noun="image", unit="images")

    def settings(self) -> tuple[Setting, ...]:
        return SETTINGS

    def code(self) -> dict[str, str]:
        return {}

    def window_step(self, choice: dict[str, Any]) -> Call:
        return Call(function="images:step", arguments=dict(choice))

    def loader(self, choice: dict[str, Any]) -> Call:
        return Call(function="images:loader", arguments={})


def rate(choice):
    size = choice["batch_size"]
    return (
        1000
        * size
        / (size + 8)
        * (1.6 if choice["amp"] else 1.0)
        * (1.2 if choice["memory_format"] == "channels_last" and choice["amp"] else 1.0)
    )


def explored(directory, losses=True, file=None):
    clock = FakeClock()

    def simulate(trial):
        clock.sleep(3.0)
        choice = trial.step_arguments
        if choice["batch_size"] > FITS:
            return OutOfMemory(detail="too large")
        if choice["compile"]:
            return Crashed(detail="no compiler")
        rng = random.Random(trial.key)
        images_per_s = rate(choice) * math.exp(rng.gauss(0, 0.01))
        figures = WINDOW_FIGURES | {
            "unit": "images",
            "units_per_s": images_per_s,
            "padded_units_per_s": images_per_s,
            "gpus": [{"utilisation_share": 0.9, "gpm_sm_share": 0.7, "power_w": 500.0}],
        }
        if losses and choice.get("losses"):
            figures["losses"] = [3 - 0.01 * step for step in range(48)]
        return Measured(figures=figures)

    windows = SubjectWindows(
        subject=ImageSubject(),
        request=SweepRequest(
            reports=directory, budget_s=1200.0, window_s=2.0, trial_timeout_s=60.0
        ),
        device="cuda",
        limits=LIMITS,
    )
    present = {"amp": False, "compile": False, "memory_format": "contiguous"}
    request = subject_request(
        windows,
        present | {"optimizer": "adam", "batch_size": 8},
        largest_size=LARGEST_SIZE,
        study_name="images: explore",
        study_file=file,
    )
    search = Exploration(
        request=request,
        runner=runner_on(FakeMachine(simulate), directory / "trials", clock),
    )
    search.run()
    return search, explore_evidence(search, confirm(search))


def test_finds_the_fastest_choice(tmp_path):
    _, evidence = explored(tmp_path)
    assert evidence.adopted
    chosen = evidence.chosen.settings
    assert rate(chosen) >= 0.97 * rate(
        {"batch_size": FITS, "amp": True, "memory_format": "channels_last"}
    )
    assert "0.00% apart" in evidence.equal_loss


def test_settings_that_change_the_recipe_stay(tmp_path):
    _, evidence = explored(tmp_path)
    assert {row.settings["optimizer"] for row in evidence.rows} == {"adam"}
    assert "optimizer: other values change the recipe" in evidence.left_out


def test_step_without_losses_cannot_round_differently(tmp_path):
    _, evidence = explored(tmp_path, losses=False)
    assert "amp true" not in evidence.chosen.name
    assert "not checked: the run with" in evidence.equal_loss


@pytest.mark.parametrize("file_name", [None, "tuning.journal"])
def test_every_configuration_is_a_trial(tmp_path, file_name):
    file = tmp_path / file_name if file_name else None
    search, evidence = explored(tmp_path, file=file)
    study = search.study.study
    if file is not None:
        study = optuna.load_study(
            study_name="images: explore",
            storage=JournalStorage(JournalFileBackend(str(file))),
        )
    names = {trial.user_attrs.get("configuration") for trial in study.trials}
    assert {row.name for row in evidence.rows} <= names
    states = {}
    for trial in study.trials:
        states.setdefault(trial.user_attrs["configuration"], trial.state)
    for row in evidence.rows:
        if row.outcome == "pruned":
            assert states[row.name] == TrialState.PRUNED
        elif row.outcome in ("crashed", "out of memory"):
            assert states[row.name] == TrialState.FAIL
    assert TrialState.RUNNING not in {trial.state for trial in study.trials}


def test_trials_have_what_windows_told(tmp_path):
    search, _ = explored(tmp_path)
    trials = search.study.study.get_trials(states=(TrialState.COMPLETE,))
    verified = [
        trial for trial in trials if trial.user_attrs.get("phase") == "verification"
    ]
    assert max(trial.user_attrs["windows"] for trial in verified) >= FEWEST_ROUNDS
    for trial in verified:
        attributes = trial.user_attrs
        assert attributes["utilisation_share"] == 0.9
        assert attributes["gpm_sm_share"] == 0.7
        assert attributes["power_w"] == 500.0
        assert attributes["outcome"] == "ran"
        assert attributes["windows"] >= 1
        assert attributes["ratio_to_starting"] == pytest.approx(
            trial.value / verified[0].value, rel=0.05
        )


def trials_of(search):
    return [
        (trial.state, trial.value, trial.params, trial.user_attrs)
        for trial in search.study.study.trials
    ]


def test_repeated_search_replaces_its_study(tmp_path):
    file = tmp_path / "tuning.journal"
    search, evidence = explored(tmp_path, file=file)
    trials = trials_of(search)
    again, same = explored(tmp_path, file=file)
    assert same == evidence
    assert trials_of(again) == trials
