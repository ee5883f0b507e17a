from dataclasses import replace

import pytest

from autotune.core.hardware import GpuFacts
from autotune.core.profile import profile_to_toml
from autotune.errors import BadInput, DoesNotFit
from autotune.search.profiles import read_profile
from autotune.tuning import bench as bench_room
from autotune.tuning.probe import Places, prepare, probe_models, probe_one, probe_request, probed_profile
from tests.autotune.search.explorations import additive
from tests.autotune.tuning.benches import SETTINGS, bench_on, machine_for, probe_asked
from tests.fakes import FakeClock, FakeMachine
from trainer.config import ModelSettings
from trainer.dataset import read_manifest


@pytest.fixture
def bench(monkeypatch, patterned_dataset):
    clock = FakeClock()
    monkeypatch.setattr(bench_room, "SystemClock", lambda: clock)
    return bench_on(machine_for(additive({}), clock), patterned_dataset)


@pytest.fixture
def manifest(patterned_dataset):
    return read_manifest(patterned_dataset)


def test_a_probe_writes_the_profile_that_it_alone_supports(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset)
    (probed,) = probe_models(bench, asked, manifest)
    stored = read_profile(tmp_path / "p" / "tiny-cpu.toml")
    assert stored.intact
    assert stored.profile == probed.profile
    probe = stored.profile.evidence.probe
    assert (probe.feasible_max, probe.infeasible_min) == (35, 36)
    assert stored.profile.constraints.global_batch_tokens == 2048
    assert stored.profile.provenance.commands == ["probe"]
    assert stored.profile.evidence.workers is None
    assert probed.previous is None


def test_each_model_has_its_profile_before_the_next_one_is_probed(tmp_path, bench, patterned_dataset, manifest):
    other = ModelSettings(name="huge", config={"model_type": "bert"})
    plain = bench.machine._simulate

    def simulate(trial):
        written = (tmp_path / "p" / "tiny-cpu.toml").is_file()
        assert written == (trial.measured["config"]["model"]["name"] == "huge")
        return plain(trial)

    bench.machine._simulate = simulate
    probe_models(bench, probe_asked(tmp_path, patterned_dataset, models=(SETTINGS, other)), manifest)
    assert {path.name for path in (tmp_path / "p").glob("*.toml")} == {"tiny-cpu.toml", "huge-cpu.toml"}


def test_the_same_probe_again_runs_nothing_and_keeps_no_second_profile(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset)
    (first,) = probe_models(bench, asked, manifest)
    before = len(bench.machine.trials)
    (again,) = probe_models(bench, asked, manifest)
    assert len(bench.machine.trials) == before
    assert all(one.from_ledger for one in again.trials)
    assert again.previous is None
    assert again.profile.train == first.profile.train


def test_another_profile_that_lies_there_is_kept_beside_it(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset)
    (first,) = probe_models(bench, asked, manifest)
    edited = first.profile.model_copy(update={"train": first.profile.train.model_copy(update={"seed": 7})})
    first.path.write_text(profile_to_toml(edited))
    (again,) = probe_models(bench, asked, manifest)
    assert again.previous is not None
    assert read_profile(again.previous).profile == edited


def test_a_profile_can_be_probed_without_being_written(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset)
    places = Places(patterned_dataset, tmp_path / "p" / "tiny-cpu.toml", tmp_path / "r")
    profile, trials = probed_profile(bench, prepare(bench, asked, SETTINGS, manifest), places)
    assert profile.evidence.probe.feasible_max == 35
    assert trials
    assert not places.profile.exists()
    written = probe_one(bench, prepare(bench, asked, SETTINGS, manifest), places)
    assert written.profile.train == profile.train


def test_what_nobody_asked_for_suits_the_site_and_the_model(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset)
    request = probe_request(bench, asked, SETTINGS, manifest)
    assert (request.device, request.precision, request.layout) == ("cpu", "fp32", "packed")
    assert (request.local_ranks, request.micro_batches) == (1, 2)
    assert request.expected is None
    strange = ModelSettings(name="s", config={"model_type": "something-new"})
    assert probe_request(bench, asked, strange, manifest).layout == "padded"
    others = replace(asked, precision="bf16", layout="bucketed", ranks=2, accumulate=False, traced=True)
    request = probe_request(bench, others, SETTINGS, manifest)
    assert (request.precision, request.layout, request.local_ranks) == ("bf16", "bucketed", 2)
    assert request.micro_batches == 1
    assert request.expected is not None


def test_the_budget_and_what_it_leaves_free_of_a_gpu_are_said(tmp_path, patterned_dataset, manifest, capsys):
    gpu = GpuFacts(
        uuid="GPU-1", index=0, name="NVIDIA H200", total_bytes=2**35, mig_enabled=False, power_cap_w=None,
        compute_mode="default", driver="580", compute_capability=(9, 0),
    )  # fmt: skip
    bench = bench_on(FakeMachine(lambda trial: pytest.fail("ran")), patterned_dataset, device="cuda", gpus=(gpu,))
    prepare(bench, probe_asked(tmp_path, patterned_dataset, memory_bytes=None), SETTINGS, manifest)
    assert "memory budget 31.5 GiB per rank (512 MiB of the GPU are left free" in capsys.readouterr().err
    prepare(bench, probe_asked(tmp_path, patterned_dataset, memory_bytes=2**34), SETTINGS, manifest)
    assert capsys.readouterr().err == "tiny: memory budget 16 GiB per rank\n"


def test_the_global_batch_is_524288_tokens_unless_it_is_given(tmp_path, bench, patterned_dataset, manifest):
    ready = prepare(bench, probe_asked(tmp_path, patterned_dataset, global_batch_tokens=None), SETTINGS, manifest)
    assert ready.global_batch_tokens == 524_288
    assert ready.request.global_batch_rows == pytest.approx(524_288 / ready.rows.mean_real_tokens, abs=0.5)
    assert prepare(bench, probe_asked(tmp_path, patterned_dataset), SETTINGS, manifest).global_batch_tokens == 2048


def test_a_global_batch_of_fewer_rows_than_ranks_is_refused_before_anything_runs(
    tmp_path, bench, patterned_dataset, manifest
):
    asked = probe_asked(tmp_path, patterned_dataset, global_batch_tokens=64, ranks=4)
    with pytest.raises(BadInput, match="leaves some of 4 ranks without a row"):
        prepare(bench, asked, SETTINGS, manifest)
    assert bench.machine.trials == []


def test_a_model_that_does_not_fit_has_no_profile(tmp_path, bench, patterned_dataset, manifest):
    asked = probe_asked(tmp_path, patterned_dataset, memory_bytes=310_000_000)
    with pytest.raises(DoesNotFit, match="not even one row"):
        probe_models(bench, asked, manifest)
    assert list((tmp_path / "p").glob("*.toml")) == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, patterned_dataset, manifest):
    bench = bench_on(FakeMachine(lambda trial: pytest.fail("ran")), patterned_dataset)
    (tmp_path / "p").write_text("a file")
    places = Places(patterned_dataset, tmp_path / "p" / "deep" / "tiny.toml", tmp_path / "r")
    with pytest.raises(BadInput, match="cannot write"):
        probe_one(bench, prepare(bench, probe_asked(tmp_path, patterned_dataset), SETTINGS, manifest), places)
