"""Optuna studies of sweeps, in memory and in files."""

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.errors import BadInput
from autotune.evidence.gpu_use import GpuUse
from autotune.trials.study import (
    PositiveIntegers,
    check_study_file,
    distributions_of,
    gpu_attributes,
    open_study,
)

VALUES = {
    "num_workers": range(9),
    "pin_memory": (True, False),
    "micro_batch_size": PositiveIntegers(least=1, most=64),
}
PARAMS = {"num_workers": 4, "pin_memory": False, "micro_batch_size": 33}
NAME = "bert-mini-cpu: workers"
FILES = ["tuning.journal", "tuning.log", "tuning.db", "tuning.sqlite"]


def storage_of(file):
    if file.suffix in (".journal", ".log"):
        return JournalStorage(JournalFileBackend(str(file)))
    return RDBStorage(f"sqlite:///{file}")


def write(file, name=NAME):
    """Write a study of a complete, a pruned and a failed trial."""
    study = open_study(name, file=file, unit="tokens")
    study.tell(
        study.ask(VALUES, PARAMS),
        120_000.0,
        attributes={"data_wait_share": 0.01, "power_w": None},
    )
    study.tell(
        study.ask(VALUES, PARAMS | {"num_workers": 0}),
        40_000.0,
        state="pruned",
        attributes={"outcome": "pruned"},
    )
    study.tell(
        study.ask(VALUES, PARAMS | {"num_workers": 8}),
        state="failed",
        attributes={"outcome": "killed: host out of memory"},
    )
    return study


@pytest.mark.parametrize("file_name", FILES)
def test_file_has_every_trial(tmp_path, file_name):
    file = tmp_path / "new" / file_name
    write(file)
    study = optuna.load_study(study_name=NAME, storage=storage_of(file))
    complete, pruned, failed = study.trials
    assert (complete.state, complete.value) == (TrialState.COMPLETE, 120_000.0)
    assert complete.params == PARAMS
    assert complete.user_attrs == {"data_wait_share": 0.01}
    assert (pruned.state, pruned.value) == (TrialState.PRUNED, 40_000.0)
    assert failed.state == TrialState.FAIL
    assert failed.user_attrs == {"outcome": "killed: host out of memory"}
    assert study.best_params == PARAMS
    assert study.metric_names == ["tokens/s"]


@pytest.mark.parametrize("file_name", FILES[1:3])
def test_repeated_command_writes_no_trial_twice(tmp_path, file_name):
    file = tmp_path / file_name
    write(file)
    write(file)
    study = optuna.load_study(study_name=NAME, storage=storage_of(file))
    assert [trial.number for trial in study.trials] == [0, 1, 2]


@pytest.mark.parametrize("file_name", FILES[1:3])
def test_file_holds_several_studies(tmp_path, file_name):
    file = tmp_path / file_name
    write(file)
    write(file, "bert-mini-cpu: explore")
    names = optuna.get_all_study_names(storage_of(file))
    assert set(names) == {NAME, "bert-mini-cpu: explore"}


@pytest.mark.parametrize("file_name", FILES[1:3])
def test_study_of_another_program_is_kept(tmp_path, file_name):
    file = tmp_path / file_name
    optuna.create_study(study_name=NAME, storage=storage_of(file))
    with pytest.raises(BadInput, match="another program") as caught:
        open_study(NAME, file=file)
    assert "--study" in caught.value.next_step
    assert optuna.get_all_study_names(storage_of(file)) == [NAME]


@pytest.mark.parametrize("file_name", ["tuning.journal", "tuning.db"])
def test_other_files_are_rejected(tmp_path, file_name):
    file = tmp_path / file_name
    file.write_text("This is a diary.\n" * 100)
    with pytest.raises(BadInput, match="cannot be used as a study"):
        open_study(NAME, file=file)
    assert file.read_text().startswith("This is a diary.")


@pytest.mark.parametrize("file_name", ["tuning.journal", "tuning.db"])
def test_missing_permission_is_explained(tmp_path, file_name):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be used as a study"):
        open_study(NAME, file=tmp_path / "file" / file_name)


def test_unknown_suffix_is_rejected(tmp_path):
    with pytest.raises(BadInput, match="its suffix is none of") as caught:
        check_study_file(tmp_path / "tuning.csv")
    assert caught.value.next_step.endswith("--study tuning.journal.")


def test_study_in_memory_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(write(None).study.trials) == 3
    assert list(tmp_path.iterdir()) == []


def test_sampler_proposes_unless_params_are_given():
    study = open_study(NAME, sampler=optuna.samplers.RandomSampler(seed=0))
    assert study.ask(VALUES, PARAMS).params == PARAMS
    assert study.ask(VALUES).params.keys() == PARAMS.keys()


def test_interrupted_trials_fail():
    study = open_study(NAME)
    study.ask(VALUES, PARAMS)
    study.fail_running()
    assert [trial.state for trial in study.study.trials] == [TrialState.FAIL]


def test_opening_leaves_verbosity_alone():
    before = optuna.logging.get_verbosity()
    open_study(NAME)
    assert optuna.logging.get_verbosity() == before


def test_values_become_distributions():
    assert distributions_of(VALUES) == {
        "num_workers": IntDistribution(0, 8),
        "pin_memory": CategoricalDistribution((True, False)),
        "micro_batch_size": IntDistribution(1, 64, log=True),
    }


@given(st.integers(-10, 10), st.integers(1, 50), st.integers(1, 7))
def test_ranges_keep_their_values(start, count, step):
    values = range(start, start + count * step, step)
    distribution = distributions_of({"number": values})["number"]
    assert [distribution.low, distribution.high] == [values[0], values[-1]]
    assert all(distribution._contains(value) for value in values)


def test_gpu_figures_become_attributes():
    use = GpuUse(utilisation_share=0.9, gpm_tensor_share=0.4, sm_clock_mhz=1700.0)
    assert gpu_attributes(use) == {"utilisation_share": 0.9, "gpm_tensor_share": 0.4}
    assert gpu_attributes(None) == {}
