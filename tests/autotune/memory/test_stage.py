from dataclasses import replace

import pytest

from autotune.errors import BadInput, ExceedsMemory, OutOfTime
from autotune.memory.sections import reasons_of
from autotune.memory.stage import prepare, probe_models, probe_one, profile_of_probe
from autotune.profiles.store import read_profile
from autotune.trials import session
from testbed.examples.profiles import but, example_profile
from testbed.fakes import FakeClock
from testbed.simulators.explorations import additive
from tests.autotune.machine.test_measured_device import H200
from tests.autotune.tune.benches import SETTINGS, bench_on, machine_for, probe_request
from trainer.config.train_config import ModelSettings
from trainer.errors import BadConfig


@pytest.fixture
def bench(monkeypatch, patterned_dataset):
    clock = FakeClock()
    monkeypatch.setattr(session, "SystemClock", lambda: clock)
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


def test_a_probe_writes_the_profile_that_it_alone_supports_and_the_same_again_runs_nothing(
    tmp_path, bench, probed
):
    (one,) = probed()
    stored = read_profile(tmp_path / "p" / "tiny-cpu.toml")
    assert (stored.intact, stored.profile) == (True, one.profile)
    probe = stored.profile.evidence.probe
    assert (probe.feasible_max, probe.infeasible_min) == (35, 36)
    assert (
        stored.profile.constraints.global_batch_tokens,
        stored.profile.train.global_batch_tokens,
    ) == (2048, None)
    assert (stored.profile.provenance.commands, stored.profile.evidence.workers) == (
        ["probe"],
        None,
    )
    before = len(bench.machine.trials)
    (again,) = probed()
    assert len(bench.machine.trials) == before
    assert all(one.from_trial_log for one in again.trials)
    assert (one.previous, again.previous) == (None, None)
    assert again.profile.train == one.profile.train


def test_each_model_has_its_profile_before_the_next_one_is_probed(
    tmp_path, bench, probed
):
    plain = bench.machine._simulate

    def simulate(trial):
        assert (tmp_path / "p" / "tiny-cpu.toml").is_file() == (
            trial.measured["config"]["model"]["name"] == "huge"
        )
        return plain(trial)

    bench.machine._simulate = simulate
    probed(SETTINGS, ModelSettings(name="huge", config={"model_type": "bert"}))
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


def test_what_nobody_asked_for_suits_the_site_and_the_model(prepared):
    probe = prepared()
    assert (probe.config.device, probe.config.precision, probe.config.layout) == (
        "cpu",
        "fp32",
        "packed",
    )
    assert (
        probe.local_ranks,
        probe.micro_batches,
        probe.overheads,
        probe.global_batch_tokens,
    ) == (1, 2, None, 2048)
    assert (
        prepared(
            ModelSettings(name="s", config={"model_type": "something-new"})
        ).config.layout
        == "padded"
    )
    probe = prepared(
        settings={"precision": "bf16", "layout": "bucketed"},
        ranks=2,
        accumulate=False,
        traced=True,
    )
    assert (probe.config.precision, probe.config.layout, probe.local_ranks) == (
        "bf16",
        "bucketed",
        2,
    )
    assert (probe.micro_batches, probe.documents_per_sequence) == (1, 1.0)
    assert probe.overheads is not None
    probe = prepared(settings={"global_batch_tokens": None})
    assert probe.global_batch_tokens == 524_288
    assert probe.config.global_batch_size == pytest.approx(
        524_288 / probe.sequence_stats.mean_non_padding_tokens, abs=0.5
    )


def test_a_profile_can_be_probed_without_being_written(tmp_path, bench, prepared):
    path = tmp_path / "p" / "tiny-cpu.toml"
    profile, trials = profile_of_probe(bench, prepared(), path)
    assert (profile.evidence.probe.feasible_max, bool(trials), path.exists()) == (
        35,
        True,
        False,
    )
    assert probe_one(bench, prepared(), path).profile.train == profile.train


def test_the_memory_budget_is_told(bench, prepared, capsys):
    bench = replace(
        bench,
        site=replace(
            bench.site, device="cuda", gpus=(replace(H200, total_bytes=2**35),)
        ),
    )
    prepared(bench=bench, memory_bytes=None)
    assert (
        "memory budget 31.5 GiB per rank (512 MiB of the GPU stay free"
        in capsys.readouterr().err
    )
    prepared(bench=bench, memory_bytes=2**34)
    assert capsys.readouterr().err == "tiny: memory budget 16 GiB per rank\n"


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"global_batch_tokens": 64}, BadInput, "too small for 4 ranks"),
        ({"layout": "stacked"}, BadConfig, "the options: layout"),
    ],
)
def test_settings_that_cannot_be_used_are_named_before_anything_runs(
    bench, prepared, settings, error, said
):
    with pytest.raises(error, match=said):
        prepared(settings=settings, ranks=4)
    assert bench.machine.trials == []


def test_a_model_that_does_not_fit_has_no_profile(tmp_path, probed):
    with pytest.raises(ExceedsMemory, match="one sequence of"):
        probed(memory_bytes=310_000_000)
    assert list((tmp_path / "p").glob("*.toml")) == []


def test_nothing_runs_for_a_profile_that_cannot_be_written(tmp_path, bench, prepared):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(BadInput, match="cannot write"):
        probe_one(bench, prepared(), tmp_path / "file" / "deep" / "tiny.toml")
    assert bench.machine.trials == []


def test_a_profile_with_another_number_of_knees_is_told_all_the_same():
    probe = example_profile().evidence.probe.model_copy(
        update={"knee_micro_batch_sizes": [3, 1, 2]}
    )
    reasons = reasons_of(but(example_profile(), evidence={"probe": probe}))
    assert "throughput levels off between 1 and 3 sequences" in reasons
