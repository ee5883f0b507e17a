"""The Optuna study of a probe's sizes."""

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.errors import ExceedsMemory, Undecided
from autotune.trials.outcomes import Crashed, TimedOut
from testbed.fakes import FakeMachine
from tests.autotune.memory.simulated_probes import (
    BUDGET_BYTES,
    FIXED_BYTES,
    SEQUENCE_BYTES,
    VERIFIED,
    Prober,
    machine_with,
    simulate,
    size_of,
    sizes_of_curve,
)


def stored(file):
    """Return the study of a probe, read from its file."""
    storage = JournalStorage(JournalFileBackend(str(file)))
    return optuna.load_study(study_name="probe", storage=storage)


def sizes(trials):
    return [trial.params["micro_batch_size"] for trial in trials]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """Return the evidence and the study of a probe, and its chosen size."""
    directory = tmp_path_factory.mktemp("probe")
    prober = Prober(directory)
    evidence = prober(FakeMachine(simulate), study_file=directory / "tuning.log")
    return evidence, stored(directory / "tuning.log"), prober.chosen_size


def test_each_size_is_one_trial(probed):
    evidence, study, _ = probed
    tried = {row.size for row in evidence.sizes} | set(sizes_of_curve(evidence))
    assert sorted(sizes(study.trials)) == sorted(tried)
    assert study.metric_names == ["tokens/s"]


def test_value_is_the_throughput_of_the_curve(probed):
    evidence, study, _ = probed
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    values = {trial.params["micro_batch_size"]: trial.value for trial in complete}
    assert values == {point.size: point.units_per_s for point in evidence.curve}


def test_size_out_of_memory_is_a_failed_trial(probed):
    _, study, _ = probed
    failed = study.get_trials(states=(TrialState.FAIL,))
    assert VERIFIED[1] in sizes(failed)
    assert {trial.user_attrs["outcome"] for trial in failed} == {"out of memory"}


def test_size_that_was_not_timed_is_pruned(probed):
    _, study, _ = probed
    (pruned,) = study.get_trials(states=(TrialState.PRUNED,))[-1:]
    assert pruned.user_attrs["outcome"] == "fits; throughput not measured"
    size = pruned.params["micro_batch_size"]
    assert pruned.user_attrs["peak_bytes"] == FIXED_BYTES + SEQUENCE_BYTES * size


def test_chosen_size_is_marked(probed):
    _, study, chosen = probed
    marked = [
        trial for trial in study.trials if trial.user_attrs["outcome"] == "chosen"
    ]
    assert sizes(marked) == [chosen]
    assert study.user_attrs["feasible_max"] == VERIFIED[0]
    assert study.user_attrs["infeasible_min"] == VERIFIED[1]
    assert study.user_attrs["memory_budget_bytes"] == BUDGET_BYTES


def test_repeated_probe_writes_the_same_study(probe, tmp_path):
    file = tmp_path / "tuning.log"
    probe(FakeMachine(simulate), study_file=file)
    first = [(trial.params, trial.values) for trial in stored(file).trials]
    machine = FakeMachine(simulate)
    probe(machine, study_file=file)
    assert machine.trials == []
    assert [(trial.params, trial.values) for trial in stored(file).trials] == first


def test_interrupted_probe_leaves_no_running_trial(probe, tmp_path):
    def interrupt(trial):
        raise KeyboardInterrupt

    file = tmp_path / "tuning.log"
    with pytest.raises(KeyboardInterrupt):
        probe(FakeMachine(interrupt), study_file=file)
    (trial,) = stored(file).trials
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["outcome"] == "interrupted"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [(Crashed(detail="boom"), "crashed"), (TimedOut(detail="late"), "timed out")],
)
def test_failed_size_has_its_outcome(probe, tmp_path, outcome, words):
    file = tmp_path / "tuning.log"
    machine = machine_with(outcome, lambda trial: size_of(trial) > 1)
    with pytest.raises(Undecided):
        probe(machine, study_file=file)
    assert stored(file).trials[-1].state == TrialState.FAIL
    assert stored(file).trials[-1].user_attrs["outcome"] == words


def test_model_that_does_not_fit_has_failed_trials_only(probe, tmp_path):
    file = tmp_path / "tuning.log"
    with pytest.raises(ExceedsMemory):
        probe(FakeMachine(simulate), memory_budget_bytes=200_000_000, study_file=file)
    assert {trial.state for trial in stored(file).trials} == {TrialState.FAIL}
