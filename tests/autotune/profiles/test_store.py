import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.baseline.values import BaselineEvidence, RecipeRow
from autotune.errors import BadInput, MachineLacks, NotCheckable, ProfileRejected
from autotune.machine.measured_device import fingerprint, open_device
from autotune.profiles import store
from autotune.profiles.approval import (
    read_with_approval,
    require_approved,
    review,
    review_path,
    verify,
)
from autotune.profiles.values import Evidence, profile_to_toml
from autotune.trials.trial_log import TrialLog, read_trial_records, trial_log_sha256
from autotune.workers.stage import add_workers
from autotune.workers.values import JointChoice
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import example_records, record
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from tests.autotune.machine.test_measured_device import H200
from trainer.data.dataset import read_manifest

RUNNER = SimpleNamespace(trial_log=SimpleNamespace(directory=Path("nowhere")))
EXAMPLE = example_profile()


def probed_again(**train):
    probed = but(
        EXAMPLE,
        train={"data": EXAMPLE.train.data.model_copy(update={"num_workers": 0})}
        | train,
    )
    return probed.model_copy(
        update={"evidence": Evidence(probe=EXAMPLE.evidence.probe)}
    )


@pytest.fixture
def path(workdir):
    return workdir / "p.toml"


def test_a_repeated_probe_keeps_the_loader_of_the_same_settings_as_it_was_counted_or_adopted_jointly(
    path,
):
    kept = store.keep_workers(probed_again(), path)
    assert (kept.train.data.num_workers, kept.evidence.workers) == (
        1,
        EXAMPLE.evidence.workers,
    )
    assert store.write_profile(path, kept) is None
    swept = add_workers(EXAMPLE, swept_to(3, adopted=True), RUNNER)
    path.write_text(profile_to_toml(swept))
    assert store.keep_workers(probed_again(), path).train.data == swept.train.data


def test_another_micro_batch_loses_the_worker_count_and_keeps_the_old_profile_or_what_else_was_there(
    path,
):
    new = store.keep_workers(probed_again(micro_batch_size=1), path)
    assert new.evidence.workers is None
    assert store.read_profile(store.write_profile(path, new)).profile == EXAMPLE
    assert store.read_profile(path).profile == new
    path.write_text("mine = 1\n")
    assert store.write_profile(path, EXAMPLE).read_text() == "mine = 1\n"
    assert store.read_profile(path).profile == EXAMPLE


def test_a_micro_batch_beyond_what_was_shown_to_fit_and_rates_of_a_pretended_gpu_are_refused(
    path,
):
    text = path.read_text()
    path.write_text(text.replace("micro_batch_size = 2", "micro_batch_size = 3"))
    with pytest.raises(ProfileRejected, match="exceeds 2, the largest"):
        store.require_local_probe(store.read_profile(path))
    path.write_text(
        text.replace("[fingerprint]", '[fingerprint]\ndriver = "0.0 (nullgpu)"')
    )
    with pytest.raises(
        MachineLacks, match="a profile's tokens/s cannot be measured on a pretended"
    ):
        store.read_profile(path)


def swept_to(chosen, *, adopted=None):
    joint = (
        None
        if adopted is None
        else JointChoice(
            trials=12,
            num_workers=5,
            prefetch_factor=8,
            pin_memory=False,
            ratio_to_workers_alone=1.2,
            adopted=adopted,
        )
    )
    return EXAMPLE.evidence.workers.model_copy(
        update={"chosen": chosen, "joint": joint}
    )


@pytest.mark.parametrize(
    ("adopted", "loader"),
    [(None, (3, 2, True)), (True, (5, 8, False)), (False, (3, 2, True))],
)
def test_a_sweep_writes_its_count_or_what_was_adopted_jointly_and_its_evidence_and_is_named_once(
    adopted, loader
):
    found = swept_to(3, adopted=adopted)
    profile = add_workers(add_workers(EXAMPLE, swept_to(2), RUNNER), found, RUNNER)
    names = ("num_workers", "prefetch_factor", "pin_memory")
    assert profile.train.data == EXAMPLE.train.data.model_copy(
        update=dict(zip(names, loader, strict=True))
    )
    assert (profile.evidence.workers, profile.evidence.probe) == (
        found,
        EXAMPLE.evidence.probe,
    )
    assert profile.provenance.commands == ["probe", "workers"]


WORTH = BaselineEvidence(
    rows=[RecipeRow(name="tuned", tokens_per_s=[9.0], speedup=1.0, outcome="ran")],
    local_ranks=1,
    window_s=2.0,
    windows=1,
    seconds=3.0,
)


@pytest.mark.parametrize(("chosen", "kept"), [(1, WORTH), (2, None)])
def test_what_settings_are_worth_changes_nothing_about_them_and_goes_with_them(
    chosen, kept
):
    worth = store.add_evidence(EXAMPLE, "baseline", WORTH, RUNNER)
    assert (worth.train, worth.evidence.baseline) == (EXAMPLE.train, WORTH)
    assert worth.provenance.commands == ["probe", "baseline"]
    changed = add_workers(worth, swept_to(chosen), RUNNER)
    assert changed.evidence.baseline == kept
    assert changed.provenance.commands == [
        "probe",
        *(["baseline"] if kept else []),
        "workers",
    ]


def test_of_two_profiles_of_one_name_each_has_its_own_trials_and_names_them_by_hash_and_time(
    tmp_path,
):
    trials = store.read_trials(tmp_path / "p.toml", EXAMPLE, tmp_path)
    finished, corrupt, check = trials.finished, trials.corrupt_lines, trials.check
    assert (finished, corrupt, check.found) == ((), 0, "no trials")
    trial_log, newest = (
        TrialLog(tmp_path / "p" / "trials", "w"),
        "2026-01-02T00:00:00+00:00",
    )
    mine = (*example_records(), record(time_utc=newest, key="newest"))
    for one in (
        *mine,
        record(site="there", dataset_hash="e", time_utc="2026-01-03T00:00:00+00:00"),
    ):
        trial_log.append(one.model_dump(mode="json"))
    found = add_workers(
        EXAMPLE, swept_to(3), SimpleNamespace(trial_log=trial_log)
    ).provenance
    assert found.trial_log_until_utc == newest
    kept = [
        one for one in read_trial_records(trial_log.directory)[0] if one.site == "here"
    ]
    assert (len(kept), found.trial_log_sha256) == (len(mine), trial_log_sha256(kept))
    trial_log.append({"no": "trial"})
    other = but(EXAMPLE, fingerprint={"dataset_hash": "e"})
    for place, profile, expected in (
        ("a", EXAMPLE, (len(mine), 1, 1)),
        ("b", other, (1, 1, len(mine))),
    ):
        trials = store.read_trials(tmp_path / place / "p.toml", profile, tmp_path)
        counts = (len(trials.finished), trials.corrupt_lines, trials.check.others)
        assert counts == expected


HOST = FakeHost(versions={"torch": "2.13.0", "transformers": "5.23.0"})


@pytest.fixture
def of_gpu(tmp_path, monkeypatch, patterned_dataset):
    """A function that writes a profile made with this GPU and CUDA 13.0, and holds it
    against another machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    manifest = read_manifest(patterned_dataset)
    site = open_device(
        "cuda", patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=H200)])
    )
    made_on = fingerprint(site, EXAMPLE.train.model, manifest, "13.0")
    data = EXAMPLE.train.data.model_copy(update={"dataset_hash": manifest.dataset_hash})
    path = tmp_path / "p.toml"
    made = but(EXAMPLE, train={"data": data, "device": "cuda"}).model_copy(
        update={"fingerprint": made_on}
    )
    path.write_text(profile_to_toml(made))

    def check(*gpus, cuda="13.0"):
        monitor = FakeGpuMonitor([FakeGpu(facts=gpu) for gpu in gpus])
        return verify(
            read_with_approval(path, tmp_path / "reports"),
            patterned_dataset,
            HOST,
            monitor,
            lambda: cuda,
        )

    return check


@pytest.mark.parametrize(
    ("changes", "cuda", "found", "field"),
    [
        ({}, "13.0", "same", None),
        ({"name": "NVIDIA H100 NVL"}, "13.0", "error", "gpu_name"),
        ({"total_bytes": 2**30}, "13.0", "error", "gpu_total_bytes"),
        ({"mig_enabled": True}, "13.0", "error", "gpu_mig"),
        ({}, "12.8", "warning", "cuda"),
        ({"driver": "570.0"}, "13.0", "warning", "driver"),
        ({"power_cap_w": 500.0}, "13.0", "warning", "gpu_power_cap_w"),
    ],
)
def test_a_gpu_that_the_figures_are_not_of_is_rejected_and_less_is_told(
    of_gpu, changes, cuda, found, field
):
    verified = of_gpu(replace(H200, **changes), cuda=cuda)
    assert [
        (one.found, one.field) for one in verified.checks if one.found != "same"
    ] == [(found, field)] * bool(field)
    with (
        pytest.raises(ProfileRejected, match=field)
        if found == "error"
        else contextlib.nullcontext()
    ):
        verified.raise_if_bad("p.toml")


def test_without_a_gpu_the_machine_is_not_checkable_and_the_rest_is(of_gpu):
    found = of_gpu()
    unknown = {check.field for check in found.with_result("unknown")}
    assert {
        "device",
        "gpu_name",
        "driver",
        "cuda",
        "cpu_model",
        "ram_total_bytes",
        "data_filesystem",
    } <= unknown
    assert {"model_sha256", "dataset_hash", "torch", "content"} <= {
        check.field for check in found.with_result("same")
    }
    with pytest.raises(NotCheckable, match="gpu_name"):
        found.raise_if_bad("p.toml")


def test_the_same_content_is_approved_wherever_it_lies(path):
    review(path, path.parent, "approved", by="reviewer", note=None)
    other = path.parent / "other" / "p.toml"
    other.parent.mkdir()
    other.write_text(path.read_text())
    assert require_approved(other, path.parent).approval.state == "approved"


def test_a_review_that_cannot_be_read_is_no_absent_one(path):
    kept = review_path(path, path.parent)
    kept.parent.mkdir()
    kept.symlink_to(kept)
    with pytest.raises(BadInput, match="cannot read"):
        read_with_approval(path, path.parent)
