"""Probe phase: complete settings before any trial, and a profile for each model."""

from dataclasses import replace

import pytest

from autotune.errors import BadInput, ExceedsMemory, OutOfTime
from autotune.memory.stage import probe_all, probe_one, profile_of_probe
from autotune.profiles.store import read_profile
from autotune.trials import trial_bench
from testbed.fakes import GPU_FACTS, FakeClock, FakeMachine
from testbed.simulators.explorations import additive
from tests.autotune.memory.simulated_probes import VERIFIED, verified_sizes
from tests.autotune.tune.benches import SETTINGS, bench_on, machine_for, probe_request
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import ModelSettings

HUGE = ModelSettings(name="huge", config={"model_type": "bert"})
TOO_SMALL_BYTES = 310_000_000
"""Memory budget below the 320 MB that one sequence of the simulated model takes."""
REQUESTED_TOKENS = 2048
"""Global batch that ``probe_request`` sets."""
DEFAULT_GLOBAL_BATCH_TOKENS = 524_288


@pytest.fixture
def bench(monkeypatch, patterned_dataset):
    """Return a bench on a CPU, whose trials are simulated and take no real time."""
    clock = FakeClock()
    monkeypatch.setattr(trial_bench, "SystemClock", lambda: clock)
    return bench_on(machine_for(additive({}), clock), patterned_dataset)


@pytest.fixture
def profiles(tmp_path):
    """Return the directory of the profiles that probes write."""
    return tmp_path / "profiles"


@pytest.fixture
def request_probe(tmp_path, patterned_dataset):
    """Return a function that makes the request of a probe."""

    def request(model=SETTINGS, **changes):
        return probe_request(tmp_path, patterned_dataset, model, **changes)

    return request


@pytest.fixture
def probe_tiny(bench, profiles, request_probe):
    """Return a function that probes the tiny model and writes its profile."""

    def probe(**changes):
        (probed,) = probe_all(bench, [request_probe(**changes)], profiles)
        return probed

    return probe


@pytest.fixture
def prepare_probe(bench, request_probe):
    """Return a function that completes the settings of a probe."""

    def prepare_on(bench=bench, **changes):
        return request_probe(**changes).prepare(bench)

    return prepare_on


@pytest.fixture
def bench_on_gpu(bench):
    """Return the bench on a GPU of 32 GiB."""
    gpu = replace(GPU_FACTS, total_bytes=32 * 2**30)
    return replace(bench, site=replace(bench.site, device="cuda", gpus=(gpu,)))


# Profiles that probes write.


def test_probe_writes_a_profile(profiles, probe_tiny):
    probed = probe_tiny()
    stored = read_profile(profiles / "tiny-cpu.toml")
    assert stored.intact
    assert stored.profile == probed.profile
    assert stored.profile.provenance.commands == ["probe"]


def test_profile_has_the_evidence_of_the_probe(probe_tiny):
    evidence = probe_tiny().profile.evidence
    assert verified_sizes(evidence.probe) == VERIFIED
    assert evidence.workers is None


def test_profile_has_the_global_batch_as_a_constraint(probe_tiny):
    profile = probe_tiny().profile
    assert profile.constraints.global_batch_tokens == REQUESTED_TOKENS
    assert profile.train.global_batch_tokens is None


def test_repeated_probe_runs_no_trial(bench, probe_tiny):
    first = probe_tiny()
    trials_before = len(bench.machine.trials)
    repeated = probe_tiny()
    assert len(bench.machine.trials) == trials_before
    assert all(finished.from_trial_log for finished in repeated.trials)
    assert repeated.profile.train == first.profile.train


def test_equal_profile_is_no_previous_one(probe_tiny):
    assert probe_tiny().previous is None
    repeated = probe_tiny()
    assert repeated.previous is None


def test_profile_is_written_before_the_next_probe(bench, profiles, request_probe):
    def simulate(trial):
        is_of_second_model = trial.config["model"]["name"] == HUGE.name
        assert (profiles / "tiny-cpu.toml").is_file() == is_of_second_model
        return bench.machine.run(trial)

    watched = replace(bench, machine=FakeMachine(simulate))
    probe_all(watched, [request_probe(SETTINGS), request_probe(HUGE)], profiles)
    assert {path.name for path in profiles.glob("*.toml")} == {
        "tiny-cpu.toml",
        "huge-cpu.toml",
    }


def test_profile_of_probe_is_not_written(bench, profiles, prepare_probe):
    path = profiles / "tiny-cpu.toml"
    profile, trials = profile_of_probe(bench, prepare_probe(), path)
    assert verified_sizes(profile.evidence.probe) == VERIFIED
    assert trials
    assert not path.exists()


def test_written_profile_is_that_of_the_probe(bench, profiles, prepare_probe):
    path = profiles / "tiny-cpu.toml"
    unwritten, _ = profile_of_probe(bench, prepare_probe(), path)
    assert probe_one(bench, prepare_probe(), path).profile.train == unwritten.train


def test_too_large_model_has_no_profile(profiles, probe_tiny):
    with pytest.raises(ExceedsMemory, match="of 296 MiB at 1 sequence"):
        probe_tiny(memory_bytes=TOO_SMALL_BYTES)
    assert list(profiles.glob("*.toml")) == []


def test_no_trial_begins_after_the_time_limit(bench, profiles, request_probe):
    with pytest.raises(OutOfTime):
        probe_all(bench, [request_probe()], profiles, ends_s=0.0)
    assert not bench.machine.trials


def test_rejects_unwritable_profile_before_any_trial(tmp_path, bench, prepare_probe):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(BadInput, match="cannot write"):
        probe_one(bench, prepare_probe(), tmp_path / "file" / "deep" / "tiny.toml")
    assert bench.machine.trials == []


# Settings of a probe.


def test_defaults_suit_the_site(prepare_probe):
    probe = prepare_probe()
    assert probe.config.device == "cpu"
    assert probe.config.precision == "fp32"
    assert probe.config.layout == "packed"
    assert probe.local_ranks == 1


def test_default_step_has_two_micro_batches(prepare_probe):
    assert prepare_probe().micro_batches == 2
    assert prepare_probe(accumulate=False).micro_batches == 1


def test_only_traced_probe_has_overheads(prepare_probe):
    assert prepare_probe(traced=False).overheads is None
    assert prepare_probe(traced=True).overheads is not None


def test_unknown_architecture_has_padded_layout(prepare_probe):
    model = ModelSettings(name="s", config={"model_type": "something-new"})
    assert prepare_probe(model=model).config.layout == "padded"


def test_requested_settings_are_kept(prepare_probe):
    probe = prepare_probe(settings={"precision": "bf16", "layout": "bucketed"}, ranks=2)
    assert probe.config.precision == "bf16"
    assert probe.config.layout == "bucketed"
    assert probe.local_ranks == 2
    assert probe.global_batch_tokens == REQUESTED_TOKENS


def test_unpacked_sequence_has_one_document(prepare_probe):
    probe = prepare_probe(settings={"layout": "bucketed"})
    assert probe.documents_per_sequence == 1.0


def test_default_global_batch_is_in_sequences(prepare_probe):
    probe = prepare_probe(settings={"global_batch_tokens": None})
    assert probe.global_batch_tokens == DEFAULT_GLOBAL_BATCH_TOKENS
    mean_tokens = probe.sequence_stats.mean_non_padding_tokens
    # Rounded to whole sequences.
    assert probe.config.global_batch_size == pytest.approx(
        DEFAULT_GLOBAL_BATCH_TOKENS / mean_tokens, abs=0.5
    )


def test_default_memory_budget_is_reported_with_reserve(
    bench_on_gpu, prepare_probe, capsys
):
    prepare_probe(bench=bench_on_gpu, memory_bytes=None)
    assert (
        "memory budget 31.5 GiB per rank (512 MiB of the GPU stay free"
        in capsys.readouterr().err
    )


def test_requested_memory_budget_is_reported(bench_on_gpu, prepare_probe, capsys):
    prepare_probe(bench=bench_on_gpu, memory_bytes=16 * 2**30)
    assert capsys.readouterr().err == "tiny: memory budget 16 GiB per rank\n"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        pytest.param(
            {"global_batch_tokens": 64},
            BadInput,
            "too small for 4 ranks",
            id="global batch of one sequence",
        ),
        pytest.param(
            {"layout": "stacked"}, BadConfig, "the options: layout", id="unknown layout"
        ),
    ],
)
def test_rejects_settings_before_any_trial(
    bench, prepare_probe, settings, error, message
):
    with pytest.raises(error, match=message):
        prepare_probe(settings=settings, ranks=4)
    assert bench.machine.trials == []
