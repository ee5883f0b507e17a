from dataclasses import replace

import pytest

from autotune.errors import BadInput, ExceedsMemory, OutOfTime
from autotune.memory.sections import reasons_of
from autotune.memory.stage import prepare, probe_models, probe_one, profile_of_probe
from autotune.profiles.store import read_profile
from autotune.trials import trial_bench
from testbed.examples.profiles import but, example_profile
from testbed.fakes import FakeClock, FakeMachine
from testbed.simulators.explorations import additive
from tests.autotune.machine.test_measured_device import H200
from tests.autotune.tune.benches import SETTINGS, bench_on, machine_for, probe_request
from trainer.config.train_config import ModelSettings
from trainer.errors import BadConfig


@pytest.fixture
def bench(monkeypatch, patterned_dataset):
    clock = FakeClock()
    monkeypatch.setattr(trial_bench, "SystemClock", lambda: clock)
    return bench_on(machine_for(additive({}), clock), patterned_dataset)


@pytest.fixture
def probed(tmp_path, bench, patterned_dataset):
    def run(*models, **changes):
        requests = [
            probe_request(tmp_path, patterned_dataset, model, **changes)
            for model in models or (SETTINGS,)
        ]
        return probe_models(bench, requests, tmp_path / "p")

    return run


@pytest.fixture
def prepared(tmp_path, bench, patterned_dataset):
    def make(model=SETTINGS, bench=bench, **changes):
        return prepare(
            bench, probe_request(tmp_path, patterned_dataset, model, **changes)
        )

    return make


def test_probe_writes_a_profile(tmp_path, probed):
    (model,) = probed()
    stored = read_profile(tmp_path / "p" / "tiny-cpu.toml")
    assert stored.intact
    assert stored.profile == model.profile
    evidence = stored.profile.evidence
    assert (evidence.probe.feasible_max, evidence.probe.infeasible_min) == (35, 36)
    assert evidence.workers is None
    assert stored.profile.constraints.global_batch_tokens == 2048
    assert stored.profile.train.global_batch_tokens is None
    assert stored.profile.provenance.commands == ["probe"]


def test_repeated_probe_runs_no_trial(bench, probed):
    (model,) = probed()
    trials_before = len(bench.machine.trials)
    (again,) = probed()
    assert len(bench.machine.trials) == trials_before
    assert all(finished.from_trial_log for finished in again.trials)
    assert (model.previous, again.previous) == (None, None)
    assert again.profile.train == model.profile.train


def test_profile_is_written_before_the_next_probe(tmp_path, bench, patterned_dataset):
    def simulate(trial):
        is_of_the_second = trial.measured["config"]["model"]["name"] == "huge"
        assert (tmp_path / "p" / "tiny-cpu.toml").is_file() == is_of_the_second
        return bench.machine.run(trial)

    huge = ModelSettings(name="huge", config={"model_type": "bert"})
    requests = [
        probe_request(tmp_path, patterned_dataset, model) for model in (SETTINGS, huge)
    ]
    watched = replace(bench, machine=FakeMachine(simulate))
    probe_models(watched, requests, tmp_path / "p")
    assert {path.name for path in (tmp_path / "p").glob("*.toml")} == {
        "tiny-cpu.toml",
        "huge-cpu.toml",
    }


def test_no_trial_begins_after_the_time_limit(tmp_path, bench, patterned_dataset):
    with pytest.raises(OutOfTime):
        probe_models(
            bench,
            [probe_request(tmp_path, patterned_dataset, SETTINGS)],
            tmp_path / "p",
            ends_s=0.0,
        )
    assert not bench.machine.trials


def test_defaults_suit_the_site(prepared):
    probe = prepared()
    assert probe.config.device == "cpu"
    assert probe.config.precision == "fp32"
    assert probe.config.layout == "packed"
    assert probe.local_ranks == 1
    assert probe.micro_batches == 2
    assert probe.overheads is None
    assert probe.global_batch_tokens == 2048


def test_unknown_architecture_has_padded_layout(prepared):
    model = ModelSettings(name="s", config={"model_type": "something-new"})
    assert prepared(model).config.layout == "padded"


def test_requested_settings_are_kept(prepared):
    probe = prepared(
        settings={"precision": "bf16", "layout": "bucketed"},
        ranks=2,
        accumulate=False,
        traced=True,
    )
    assert probe.config.precision == "bf16"
    assert probe.config.layout == "bucketed"
    assert probe.local_ranks == 2
    assert probe.micro_batches == 1
    assert probe.documents_per_sequence == 1.0
    assert probe.overheads is not None


def test_default_global_batch_is_in_sequences(prepared):
    probe = prepared(settings={"global_batch_tokens": None})
    assert probe.global_batch_tokens == 524_288
    mean_tokens = probe.sequence_stats.mean_non_padding_tokens
    assert probe.config.global_batch_size == pytest.approx(
        524_288 / mean_tokens, abs=0.5
    )


def test_profile_of_probe_is_not_written(tmp_path, bench, prepared):
    path = tmp_path / "p" / "tiny-cpu.toml"
    profile, trials = profile_of_probe(bench, prepared(), path)
    assert profile.evidence.probe.feasible_max == 35
    assert trials
    assert not path.exists()
    assert probe_one(bench, prepared(), path).profile.train == profile.train


@pytest.fixture
def bench_on_gpu(bench):
    """Return the bench on a GPU of 32 GiB."""
    gpu = replace(H200, total_bytes=2**35)
    return replace(bench, site=replace(bench.site, device="cuda", gpus=(gpu,)))


def test_default_memory_budget_is_reported_with_reserve(bench_on_gpu, prepared, capsys):
    prepared(bench=bench_on_gpu, memory_bytes=None)
    assert (
        "memory budget 31.5 GiB per rank (512 MiB of the GPU stay free"
        in capsys.readouterr().err
    )


def test_requested_memory_budget_is_reported(bench_on_gpu, prepared, capsys):
    prepared(bench=bench_on_gpu, memory_bytes=2**34)
    assert capsys.readouterr().err == "tiny: memory budget 16 GiB per rank\n"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"global_batch_tokens": 64}, BadInput, "too small for 4 ranks"),
        ({"layout": "stacked"}, BadConfig, "the options: layout"),
    ],
)
def test_rejects_settings_before_any_trial(bench, prepared, settings, error, message):
    with pytest.raises(error, match=message):
        prepared(settings=settings, ranks=4)
    assert bench.machine.trials == []


def test_too_large_model_has_no_profile(tmp_path, probed):
    with pytest.raises(ExceedsMemory, match="one sequence of"):
        probed(memory_bytes=310_000_000)
    assert list((tmp_path / "p").glob("*.toml")) == []


def test_rejects_unwritable_profile_before_any_trial(tmp_path, bench, prepared):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(BadInput, match="cannot write"):
        probe_one(bench, prepared(), tmp_path / "file" / "deep" / "tiny.toml")
    assert bench.machine.trials == []


def test_knee_of_three_sizes_is_reported():
    probe = example_profile().evidence.probe.model_copy(
        update={"knee_micro_batch_sizes": [3, 1, 2]}
    )
    reasons = reasons_of(but(example_profile(), evidence={"probe": probe}))
    assert "throughput levels off between 1 and 3 sequences" in reasons
