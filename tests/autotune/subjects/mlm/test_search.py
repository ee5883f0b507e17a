import math
from dataclasses import replace

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.errors import ProfileRejected
from autotune.memory.stage import probe_all
from autotune.profiles.decide.batch_split import global_batch_size_of
from autotune.profiles.store import read_profile
from autotune.search.request import StepPrediction
from autotune.search.stage import explore
from autotune.search.step import SearchedStep
from autotune.speed.decide import data_sheet_rates
from autotune.subjects.mlm import search as mlm_search
from autotune.subjects.mlm.search import explore_request
from autotune.subjects.mlm.settings import TRIED_VALUES
from autotune.trials import trial_bench
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory
from autotune.trials.sweep_request import SweepRequest
from testbed.examples.profiles import but
from testbed.fakes import FakeClock, FakeMachine
from testbed.simulators.explorations import additive
from tests.autotune.memory.simulated_probes import trace_figures
from tests.autotune.tune.benches import bench_on, machine_for, probe_request
from trainer.config import compilers

BF16_WINS = additive(
    {"bf16": 1.5, "bucketed": 0.5, "padded": 0.4, "full": 0.7, "selective": 0.8}
)
PROBED_ROWS = 33


def nothing_wins(choice, other_sizes=0.7):
    slower = {
        "bf16": 0.6,
        "bucketed": 0.4,
        "padded": 0.4,
        "full": 0.7,
        "selective": 0.8,
    }
    cost = math.prod(slower.get(value, 1.0) for value in choice.values())
    size_factor = 1.0 if choice["micro_batch_size"] == PROBED_ROWS else other_sizes
    return 1000 * cost * size_factor


def more_rows_win(choice):
    return nothing_wins(choice, other_sizes=1.0) * choice["micro_batch_size"]


def trained_with(profile):
    """Return the profile's values of the settings that are searched."""
    train = profile.train
    names = [*TRIED_VALUES, "micro_batch_size"]
    values = {name: getattr(train, name) for name in names}
    return values | {"compile": train.compiled, "attention": "auto"}


class Workbench:
    def __init__(self, directory, data, machine):
        self.machine = machine
        self.bench = bench_on(machine, data)
        self.place = directory
        self.data = data
        self.path = directory / "p" / "tiny-cpu.toml"
        probe_all(self.bench, [probe_request(directory, data)], directory / "p")
        machine.trials.clear()
        self.before = read_profile(self.path)
        self.windows = SweepRequest(data=data, reports=directory / "r", budget_s=600.0)

    def request(self, **changes):
        return explore_request(
            self.bench,
            self.before,
            probe_request(self.place, self.data, **changes),
            self.windows,
        )

    def explored(self):
        exploration = explore(
            SearchedStep(
                bench=self.bench,
                stored=self.before,
                probe=probe_request(self.place, self.data),
                sweep=self.windows,
            )
        )
        stored = read_profile(self.path)
        assert stored.intact
        return stored, exploration


@pytest.fixture
def make(monkeypatch, tmp_path, patterned_dataset):
    """Return a function that makes a workbench that fits ``above`` sequences."""
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    clock = FakeClock()
    monkeypatch.setattr(trial_bench, "SystemClock", lambda: clock)

    def workbench(rate=BF16_WINS, above=64, precision="bf16"):
        plain = machine_for(rate, clock)

        def simulate(trial):
            config = trial.config
            refused = (
                config["precision"] == precision and config["micro_batch_size"] > above
            )
            return (
                OutOfMemory(detail="refused")
                if trial.job == "step" and refused
                else plain.run(trial)
            )

        return Workbench(tmp_path, patterned_dataset, FakeMachine(simulate))

    return workbench


def test_faster_settings_are_written(make):
    work = make()
    stored, evidence = work.explored()
    train = stored.profile.train
    probe_evidence = stored.profile.evidence
    assert evidence.adopted
    assert (train.precision, train.layout, train.activation_checkpointing) == (
        "bf16",
        "packed",
        "none",
    )
    assert trained_with(stored.profile) == evidence.chosen.settings
    assert (probe_evidence.explore, probe_evidence.probe.feasible_max) == (evidence, 35)
    assert train.micro_batch_size <= 35
    assert stored.profile.provenance.commands == ["probe", "explore"]
    steps = [trial.config for trial in work.machine.trials if trial.job == "step"]
    # The chosen settings' memory is proven as well.
    assert {config["precision"] for config in steps} == {"bf16"}
    assert [path.name for path in work.path.parent.iterdir()] == ["tiny-cpu.toml"]
    work.machine.trials.clear()
    again, same = work.explored()
    assert work.machine.trials == []
    assert (same, again.profile.train) == (evidence, train)


def test_global_batch_stays_the_same(make):
    work = make(additive({"padded": 3.0}))
    stored, exploration = work.explored()
    assert exploration.chosen.settings["layout"] == "padded"
    before = work.before.profile
    after = stored.profile
    assert after.constraints == before.constraints
    mean = after.evidence.probe.mean_tokens_per_sequence
    assert after.train.global_batch_size == global_batch_size_of(
        before.constraints.global_batch_tokens, mean
    )
    # Padded sequences hold fewer tokens.
    assert after.train.global_batch_size > before.train.global_batch_size


def test_settings_must_be_faster_after_probing(make):
    stored, exploration = make(above=9).explored()
    train = stored.profile.train
    assert exploration.adopted
    assert (train.precision, train.micro_batch_size) == (
        "bf16",
        exploration.candidate.settings["micro_batch_size"],
    )
    assert train.micro_batch_size <= 8
    assert exploration.ratio_low > 1


@pytest.mark.parametrize(
    ("machine", "micro_batch_sizes", "reason"),
    [
        ((nothing_wins,), (PROBED_ROWS, None), ""),
        ((BF16_WINS, 1), (PROBED_ROWS, 1), "was not verified to be faster"),
        (
            (BF16_WINS, 0),
            (PROBED_ROWS, None),
            "is faster, but was rejected: tiny exceeds the memory budget",
        ),
        # With headroom 32 fit, so that two micro-batches of 17 are chosen.
        (
            (more_rows_win, PROBED_ROWS, "fp32"),
            (17, PROBED_ROWS),
            "leaves the headroom free, which is the starting configuration",
        ),
    ],
    ids=["nothing is faster", "slower at one sequence", "nothing fits", "no headroom"],
)
def test_slower_settings_are_rejected(make, machine, micro_batch_sizes, reason):
    work = make(*machine)
    before = work.before.profile
    stored, exploration = work.explored()
    assert not exploration.adopted
    assert exploration.chosen == exploration.starting
    assert exploration.starting.settings == trained_with(before)
    assert (stored.profile.train, stored.profile.evidence.probe) == (
        before.train,
        before.evidence.probe,
    )
    assert exploration.starting.settings["micro_batch_size"] == micro_batch_sizes[0]
    assert micro_batch_sizes[1] in (
        None,
        exploration.candidate.settings["micro_batch_size"],
    )
    assert reason in exploration.choice


def test_rejects_profile_of_another_model(make):
    work = make()
    work.before = replace(
        work.before,
        profile=but(work.before.profile, fingerprint={"model_sha256": "other"}),
    )
    with pytest.raises(ProfileRejected):
        work.explored()
    assert work.machine.trials == []


def test_profile_is_the_first_configuration(make):
    work = make()
    request = work.request()
    starting = dict(request.configurations[0])
    assert starting | {"micro_batch_size": 33} == trained_with(work.before.profile)
    assert request.budget_s == 600.0
    sizes = [choice["micro_batch_size"] for choice in request.configurations]
    assert max(sizes) <= 64


def test_predicts_largest_micro_batch_by_kind(make):
    work = make()
    traces = trace_all(work)
    request = work.request(traced=True)
    assert traces == []  # not before a configuration is proposed
    kind = kind_of(request)
    assert request.predictor.predict(kind) == StepPrediction(largest_size=32)
    assert set(traces) == {("none", False)}  # 300 MB and 20 MB a sequence, in 1 GB
    request.predictor.predict(kind.but({"compile": True}))
    assert set(traces) == {("none", False), ("none", True)}
    assert {trial.job for trial in work.machine.trials} == {"trace"}


def test_known_rates_predict_steps(make, monkeypatch):
    work = make()
    trace_all(work)
    monkeypatch.setattr(
        mlm_search,
        "known_rates",
        lambda name: data_sheet_rates("NVIDIA H100 80GB HBM3"),
    )
    request = work.request(traced=True)
    kind = kind_of(request).but({"activation_checkpointing": "full"})
    seconds = request.predictor.predict(kind).step_s_by_size
    sizes = {
        choice["micro_batch_size"]
        for choice in request.configurations
        if choice.but({"micro_batch_size": 1}) == kind
    }
    assert set(seconds) == sizes - {33}  # 32 fit
    assert all(step_s > 0 for step_s in seconds.values())
    assert "data sheet" in request.predictor.defined_by["rates"]


def test_untraceable_model_has_no_prediction(make):
    work = make()
    work.machine._simulate = lambda trial: Crashed(detail="no meta kernel")
    request = work.request(traced=True)
    prediction = request.predictor.predict(kind_of(request))
    assert prediction == StepPrediction(largest_size=None)
    assert work.request(traced=False).predictor is None


def test_search_is_written_as_a_study(make):
    work = make()
    file = work.place / "tuning.journal"
    work.windows = replace(work.windows, study_file=file)
    _, exploration = work.explored()
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.load_study(study_name="tiny-cpu: explore", storage=storage)
    tried = {trial.user_attrs["configuration"] for trial in study.trials}
    assert {row.name for row in exploration.rows} <= tried | {exploration.starting.name}


def trace_all(work):
    """Answer traces, and return the settings of each."""
    traces = []

    def simulate(trial):
        config = trial.config
        traces.append((config["activation_checkpointing"], config["compile"]))
        return Measured(figures=trace_figures(trial))

    work.machine._simulate = simulate
    return traces


def kind_of(request):
    return request.configurations[0].but({"micro_batch_size": 1})
