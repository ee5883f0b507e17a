import math
from dataclasses import replace

import pytest

from autotune.errors import ProfileRejected
from autotune.memory.stage import probe_models, requested_config
from autotune.profiles.decide.batch_split import global_batch_size_of
from autotune.profiles.store import read_profile
from autotune.search import stage
from autotune.search.stage import explore_request, explore_settings
from autotune.search.values import Configuration
from autotune.speed.decide import data_sheet_rates
from autotune.trials import session
from autotune.trials.values import Crashed, Measured, OutOfMemory
from autotune.workers.values import SweepRequest
from testbed.examples.profiles import but
from testbed.fakes import GPU_FACTS, FakeClock, FakeMachine
from testbed.simulators.explorations import additive
from tests.autotune.memory.test_measure import trace_figures
from tests.autotune.tune.benches import SETTINGS, bench_on, machine_for, probe_request
from trainer.config import resolve
from trainer.config.train_config import ModelSettings, TrainConfig

BF16_WINS = additive(
    {"bf16": 1.5, "bucketed": 0.5, "padded": 0.4, "full": 0.7, "selective": 0.8}
)
PROBED_ROWS = 33


def nothing_wins(knobs, others=0.7):
    slower = {
        "bf16": 0.6,
        "bucketed": 0.4,
        "padded": 0.4,
        "full": 0.7,
        "selective": 0.8,
    }
    cost = math.prod(slower.get(value, 1.0) for value in knobs.model_dump().values())
    return 1000 * cost * (1.0 if knobs.micro_batch_size == PROBED_ROWS else others)


def more_rows_win(knobs):
    return nothing_wins(knobs, others=1.0) * knobs.micro_batch_size


class Workbench:
    def __init__(self, place, data, machine):
        self.machine, self.bench = machine, bench_on(machine, data)
        self.place, self.data = place, data
        self.path = place / "p" / "tiny-cpu.toml"
        probe_models(self.bench, [probe_request(place, data)], place / "p")
        machine.trials.clear()
        self.before = read_profile(self.path)
        self.windows = SweepRequest(data=data, reports=place / "r", minutes=10.0)

    def request(self, **changes):
        return explore_request(
            self.bench,
            self.before,
            probe_request(self.place, self.data, **changes),
            self.windows,
        )

    def explored(self):
        found = explore_settings(
            self.bench, self.before, probe_request(self.place, self.data), self.windows
        )
        stored = read_profile(self.path)
        assert stored.intact
        return stored, found


@pytest.fixture
def make(monkeypatch, tmp_path, patterned_dataset):
    """A function that makes a workbench on which layers cannot be compiled, nor more
    rows than ``above`` run."""
    monkeypatch.setattr(resolve.shutil, "which", lambda name: None)
    clock = FakeClock()
    monkeypatch.setattr(session, "SystemClock", lambda: clock)

    def workbench(rate=BF16_WINS, above=64, precision="bf16"):
        plain = machine_for(rate, clock)

        def simulate(trial):
            config = trial.measured["config"]
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


def test_settings_that_are_proven_to_be_faster_are_probed_and_written_over_no_kept_profile_and_the_same_again(
    make,
):
    work = make()
    stored, found = work.explored()
    train, evidence = stored.profile.train, stored.profile.evidence
    assert found.adopted
    assert (train.precision, train.layout, train.activation_checkpointing) == (
        "bf16",
        "packed",
        "none",
    )
    assert Configuration.of(train) == found.chosen
    assert (evidence.explore, evidence.probe.feasible_max) == (found, 35)
    assert train.micro_batch_size <= 35
    assert stored.profile.provenance.commands == ["probe", "explore"]
    steps = [
        trial.measured["config"] for trial in work.machine.trials if trial.job == "step"
    ]
    # The chosen settings' memory is proven as well.
    assert {config["precision"] for config in steps} == {"bf16"}
    assert [path.name for path in work.path.parent.iterdir()] == ["tiny-cpu.toml"]
    work.machine.trials.clear()
    again, same = work.explored()
    assert work.machine.trials == []
    assert (same, again.profile.train) == (found, train)


def test_the_global_batch_stays_what_it_was(make):
    work = make(additive({"padded": 3.0}))
    stored, found = work.explored()
    assert found.chosen.layout == "padded"
    before, after = work.before.profile, stored.profile
    assert after.constraints == before.constraints
    mean = after.evidence.probe.mean_tokens_per_sequence
    assert after.train.global_batch_size == global_batch_size_of(
        before.constraints.global_batch_tokens, mean
    )
    # As padded rows hold less.
    assert after.train.global_batch_size > before.train.global_batch_size


def test_where_a_probe_finds_that_fewer_rows_fit_these_have_to_be_proven_as_well(make):
    stored, found = make(above=9).explored()
    train = stored.profile.train
    assert found.adopted
    assert (train.precision, train.micro_batch_size) == (
        "bf16",
        found.candidate.micro_batch_size,
    )
    assert train.micro_batch_size <= 8
    assert found.ratio_low > 1


@pytest.mark.parametrize(
    ("machine", "rows", "said"),
    [
        ((nothing_wins,), (PROBED_ROWS, None), ""),
        ((BF16_WINS, 1), (PROBED_ROWS, 1), "was not verified to be faster"),
        (
            (BF16_WINS, 0),
            (PROBED_ROWS, None),
            "is faster, but was rejected: one sequence of",
        ),
        # With headroom 32 rows, so that two micro-batches of 17 are chosen.
        (
            (more_rows_win, PROBED_ROWS, "fp32"),
            (17, PROBED_ROWS),
            "leaves the headroom free, which is the starting configuration",
        ),
    ],
)
def test_what_is_not_faster_with_the_rows_that_fit_is_not_taken_and_that_is_said(
    make, machine, rows, said
):
    work = make(*machine)
    before = work.before.profile
    stored, found = work.explored()
    assert not found.adopted
    assert found.chosen == found.starting == Configuration.of(before.train)
    assert (stored.profile.train, stored.profile.evidence.probe) == (
        before.train,
        before.evidence.probe,
    )
    assert found.starting.micro_batch_size == rows[0]
    assert rows[1] in (None, found.candidate.micro_batch_size)
    assert said in found.choice


def test_a_profile_of_another_model_is_refused(make):
    work = make()
    work.before = replace(
        work.before,
        profile=but(work.before.profile, fingerprint={"model_sha256": "other"}),
    )
    with pytest.raises(ProfileRejected):
        work.explored()
    assert work.machine.trials == []


STRANGE = ModelSettings(name="strange", config={"model_type": "something-new"})
TINY = TrainConfig(model=SETTINGS, layout="packed")
NO_DROPOUT = TINY.model_copy(update={"attention_dropout": 0.0})


@pytest.mark.parametrize(
    ("train", "asked", "device", "compiler", "name", "values", "said"),
    [
        (
            TINY,
            {"precision": "fp32"},
            "cpu",
            None,
            "precision",
            ("fp32",),
            "you set fp32",
        ),
        (
            TINY,
            {"layout": "packed"},
            "cpu",
            None,
            "layout",
            ("packed",),
            "you set packed",
        ),
        (
            TrainConfig(model=STRANGE, layout="padded"),
            {},
            "cpu",
            None,
            "layout",
            ("padded", "bucketed"),
            "something-new cannot be packed",
        ),
        (
            TINY,
            {},
            "cpu",
            None,
            "compile",
            (False,),
            "no compiler found (g++, c++, clang++)",
        ),
        (TINY, {}, "cpu", "g++", "compile", (False, True), None),
        (TINY, {}, "cpu", None, "attention", ("auto",), "varlen requires a GPU"),
        (TINY, {}, "H100", "gcc", "attention", ("auto", "sdpa"), None),
        (NO_DROPOUT, {}, "A100", "gcc", "attention", ("auto", "sdpa"), None),
        (NO_DROPOUT, {}, "H100", "gcc", "attention", ("auto", "sdpa", "fa3"), None),
        (
            TINY,
            {},
            "A100",
            "gcc",
            "compile_mode",
            ("default", "max-autotune-no-cudagraphs", "reduce-overhead"),
            None,
        ),
        (TINY, {}, "A100", None, "compile_mode", ("default",), None),
        (TINY, {}, "cpu", "g++", "compile_mode", ("default",), None),
        (TINY, {}, "H100", "gcc", "float8", ("none", "tensorwise", "rowwise"), None),
        (TINY, {}, "A100", "gcc", "float8", ("none",), None),
        (
            TINY,
            {},
            "H100",
            "absent",
            "float8",
            ("none",),
            "torchao is not installed (pip install '.[fp8]')",
        ),
        (TINY, {"float8": "none"}, "H100", "gcc", "float8", ("none",), "you set none"),
        (TINY, {}, "cpu", "g++", "float8", ("none",), None),
        (TINY, {}, "H100", "gcc", "fused_cross_entropy", (False, True), None),
        (TINY, {}, "H100", "absent", "fused_cross_entropy", (False,), None),
        (
            TINY,
            {"fused_cross_entropy": False},
            "H100",
            "gcc",
            "fused_cross_entropy",
            (False,),
            "you set false",
        ),
    ],
)
def test_what_cannot_be_chosen_is_not_explored(
    make, monkeypatch, train, asked, device, compiler, name, values, said
):
    bench = make().bench
    monkeypatch.setattr(resolve.shutil, "which", lambda name: compiler)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(
        stage, "find_spec", lambda name: compiler if compiler != "absent" else None
    )
    gpus = (
        ()
        if device == "cpu"
        else (replace(GPU_FACTS, compute_capability=(9 if device == "H100" else 8, 0)),)
    )
    bench = replace(
        bench, site=replace(bench.site, device="cuda" if gpus else "cpu", gpus=gpus)
    )
    levels, left_out = stage._levels(
        bench, train, requested_config(train.model, **asked)
    )
    assert levels[name] == values
    assert [one for one in left_out if one.startswith(name)] == (
        [] if said is None else [f"{name}: {said}"]
    )


def test_the_profile_stands_first_and_all_layouts_hold_the_same_tokens(make):
    work = make()
    request = work.request()
    assert request.cells[0].kind == Configuration.of(work.before.profile.train).kind
    assert set(request.global_batch_size) == {"packed", "bucketed", "padded"}
    assert request.global_batch_size["packed"] < request.global_batch_size["padded"]
    assert request.non_padding_shares["bucketed"] is None
    assert (
        0
        < request.non_padding_shares["padded"]
        < request.non_padding_shares["packed"]
        <= 1
    )
    assert request.training.request.budget_s == 600.0
    assert max(cell.micro_batch_size for cell in request.cells) <= 64


def test_the_largest_micro_batch_is_predicted_by_kind_and_none_where_nothing_can_be(
    make, monkeypatch
):
    work, traces = make(), []

    def simulate(trial):
        traces.append(
            (
                trial.measured["config"]["activation_checkpointing"],
                trial.measured["config"]["compile"],
            )
        )
        return Measured(figures=trace_figures(trial))

    work.machine._simulate = simulate
    request = work.request(traced=True)
    assert traces == []  # not before a cell is proposed
    plain = request.cells[0].kind
    assert request.predict(plain) == {"max": 32}
    assert set(traces) == {("none", False)}  # 300 MB and 20 MB for each row, in 1 GB
    monkeypatch.setattr(
        stage, "known_rates", lambda name: data_sheet_rates("NVIDIA H100 80GB HBM3")
    )
    predicting, full = (
        work.request(traced=True),
        plain.but(activation_checkpointing="full"),
    )
    steps_s = predicting.predict(full)["step_s"]
    # Of 32 that fit.
    assert set(steps_s) == {
        one.micro_batch_size for one in request.cells if one.kind == full
    } - {33}
    assert all(seconds > 0 for seconds in steps_s.values())
    assert (
        request.predicted_for.get("rates"),
        "data sheet" in predicting.predicted_for["rates"],
    ) == (None, True)
    request.predict(plain.but(compile=True))
    assert set(traces) == {("none", False), ("none", True), ("full", False)}
    assert {trial.job for trial in work.machine.trials} == {"trace"}
    work.machine._simulate = lambda trial: Crashed(detail="no meta kernel")
    assert work.request(traced=True).predict(plain) == {"max": None}
    assert work.request(traced=False).predict is None
