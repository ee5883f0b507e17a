import math
from dataclasses import replace

import pytest

from autotune.errors import ProfileRejected
from autotune.evidence.explore import Configuration
from autotune.memory.stage import probe_models, requested_config
from autotune.profiles.decide.batch_split import global_batch_size_of
from autotune.profiles.store import read_profile
from autotune.search import stage
from autotune.search.stage import explore_request, explore_settings
from autotune.speed.decide import data_sheet_rates
from autotune.trials import trial_bench
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory
from autotune.trials.sweep_request import SweepRequest
from testbed.examples.profiles import but
from testbed.fakes import GPU_FACTS, FakeClock, FakeMachine
from testbed.simulators.explorations import additive
from tests.autotune.memory.simulated_probes import trace_figures
from tests.autotune.tune.benches import SETTINGS, bench_on, machine_for, probe_request
from trainer.config import compilers
from trainer.config.train_config import ModelSettings, TrainConfig

BF16_WINS = additive(
    {"bf16": 1.5, "bucketed": 0.5, "padded": 0.4, "full": 0.7, "selective": 0.8}
)
PROBED_ROWS = 33


def nothing_wins(knobs, other_sizes=0.7):
    slower = {
        "bf16": 0.6,
        "bucketed": 0.4,
        "padded": 0.4,
        "full": 0.7,
        "selective": 0.8,
    }
    cost = math.prod(slower.get(value, 1.0) for value in knobs.model_dump().values())
    return 1000 * cost * (1.0 if knobs.micro_batch_size == PROBED_ROWS else other_sizes)


def more_rows_win(knobs):
    return nothing_wins(knobs, other_sizes=1.0) * knobs.micro_batch_size


class Workbench:
    def __init__(self, directory, data, machine):
        self.machine = machine
        self.bench = bench_on(machine, data)
        self.place = directory
        self.data = data
        self.path = directory / "p" / "tiny-cpu.toml"
        probe_models(self.bench, [probe_request(directory, data)], directory / "p")
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
        exploration = explore_settings(
            self.bench, self.before, probe_request(self.place, self.data), self.windows
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
    assert Configuration.of(train) == evidence.chosen
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
    assert exploration.chosen.layout == "padded"
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
        exploration.candidate.micro_batch_size,
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
            "is faster, but was rejected: one sequence of",
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
    assert exploration.chosen == exploration.starting == Configuration.of(before.train)
    assert (stored.profile.train, stored.profile.evidence.probe) == (
        before.train,
        before.evidence.probe,
    )
    assert exploration.starting.micro_batch_size == micro_batch_sizes[0]
    assert micro_batch_sizes[1] in (None, exploration.candidate.micro_batch_size)
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


STRANGE = ModelSettings(name="strange", config={"model_type": "something-new"})
TINY = TrainConfig(model=SETTINGS, layout="packed")
NO_DROPOUT = TINY.model_copy(update={"attention_dropout": 0.0})


@pytest.mark.parametrize(
    ("train", "requested", "device", "compiler", "name", "values", "reason"),
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
        (NO_DROPOUT, {}, "H100", "gcc", "attention", ("auto", "sdpa", "fa4"), None),
        (NO_DROPOUT, {}, "H100", "absent", "attention", ("auto", "sdpa"), None),
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
        (TINY, {}, "H100", "gcc", "fused_norms", (False, True), None),
        (TINY, {}, "H100", None, "fused_norms", (False,), None),
        (TINY, {}, "H100", "gcc", "gelu_epilogues", (False, True), None),
        (TINY, {}, "cpu", "g++", "gelu_epilogues", (False,), None),
        (TINY, {}, "cpu", "g++", "fused_norms", (False,), None),
        (
            TINY,
            {"fused_norms": False},
            "H100",
            "gcc",
            "fused_norms",
            (False,),
            "you set false",
        ),
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
    ids=[
        "precision set by user",
        "layout set by user",
        "model without packing",
        "no compiler",
        "compiler",
        "no varlen on CPU",
        "dropout on H100",
        "fa4 needs H100",
        "fa4 on H100",
        "fa4 without package",
        "compile modes",
        "compile modes without compiler",
        "compile modes on CPU",
        "float8 on H100",
        "float8 needs H100",
        "float8 without torchao",
        "float8 set by user",
        "float8 on CPU",
        "fused norms",
        "fused norms without compiler",
        "GELU epilogues",
        "GELU epilogues on CPU",
        "fused norms on CPU",
        "fused norms set by user",
        "fused loss",
        "fused loss without package",
        "fused loss set by user",
    ],
)
def test_unavailable_choices_are_left_out(
    make, monkeypatch, train, requested, device, compiler, name, values, reason
):
    bench = make().bench
    monkeypatch.setattr(compilers.shutil, "which", lambda name: compiler)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(
        stage, "find_spec", lambda name: compiler if compiler != "absent" else None
    )
    monkeypatch.setattr(stage, "has_flash_attention_4", lambda: compiler != "absent")
    gpus = (
        ()
        if device == "cpu"
        else (replace(GPU_FACTS, compute_capability=(9 if device == "H100" else 8, 0)),)
    )
    bench = replace(
        bench, site=replace(bench.site, device="cuda" if gpus else "cpu", gpus=gpus)
    )
    levels, left_out = stage._levels(
        bench, train, requested_config(train.model, **requested)
    )
    assert levels[name] == values
    assert [entry for entry in left_out if entry.startswith(name)] == (
        [] if reason is None else [f"{name}: {reason}"]
    )


def test_profile_is_the_first_cell(make):
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


def test_predicts_largest_micro_batch_by_kind(make, monkeypatch):
    work = make()
    traces = []

    def simulate(trial):
        traces.append(
            (
                trial.config["activation_checkpointing"],
                trial.config["compile"],
            )
        )
        return Measured(figures=trace_figures(trial))

    work.machine._simulate = simulate
    request = work.request(traced=True)
    assert traces == []  # not before a cell is proposed
    plain = request.cells[0].kind
    assert request.predict(plain) == {"max": 32}
    assert set(traces) == {("none", False)}  # 300 MB and 20 MB a sequence, in 1 GB
    monkeypatch.setattr(
        stage, "known_rates", lambda name: data_sheet_rates("NVIDIA H100 80GB HBM3")
    )
    predicting = work.request(traced=True)
    full = plain.but(activation_checkpointing="full")
    steps_s = predicting.predict(full)["step_s"]
    # Of 32 that fit.
    assert set(steps_s) == {
        cell.micro_batch_size for cell in request.cells if cell.kind == full
    } - {33}
    assert all(seconds > 0 for seconds in steps_s.values())
    assert (
        request.predicted_for.get("rates"),
        "data sheet" in predicting.predicted_for["rates"],
    ) == (None, True)
    request.predict(plain.but(compile=True))
    assert set(traces) == {("none", False), ("none", True), ("full", False)}
    assert {trial.job for trial in work.machine.trials} == {"trace"}


def test_untraceable_model_has_no_prediction(make):
    work = make()
    plain = work.request().cells[0].kind
    work.machine._simulate = lambda trial: Crashed(detail="no meta kernel")
    assert work.request(traced=True).predict(plain) == {"max": None}
    assert work.request(traced=False).predict is None
