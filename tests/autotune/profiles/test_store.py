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
)
from autotune.profiles.checks import Check, Verification
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence, read_trials
from autotune.profiles.toml_file import profile_to_toml
from autotune.profiles.values import Evidence
from autotune.profiles.verification import verify_profile
from autotune.trials.trial_log import TrialLog, read_trial_records, trial_log_sha256
from autotune.workers.stage import add_workers
from autotune.workers.values import JointChoice
from testbed.examples.profiles import but, example_profile
from testbed.examples.trials import example_records, record
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from tests.autotune.machine.test_measured_device import H200
from trainer.data.manifest import read_manifest
from trainer.errors import UnreadableFile

RUNNER = SimpleNamespace(trial_log=SimpleNamespace(directory=Path("nowhere")))
EXAMPLE = example_profile()


def probed_again(**train):
    """Return the example as another probe would write it, with other settings."""
    data = EXAMPLE.train.data.model_copy(update={"num_workers": 0})
    profile = but(EXAMPLE, train={"data": data} | train)
    evidence = Evidence(probe=EXAMPLE.evidence.probe)
    return profile.model_copy(update={"evidence": evidence})


def swept_to(chosen, *, adopted=None):
    """Return the evidence of a sweep.

    Args:
        chosen: Its number of workers.
        adopted: True if a joint search found something faster, False if not, None if
            there was none.
    """
    joint = None
    if adopted is not None:
        joint = JointChoice(
            trials=12,
            num_workers=5,
            prefetch_factor=8,
            pin_memory=False,
            ratio_to_workers_alone=1.2,
            adopted=adopted,
        )
    workers = EXAMPLE.evidence.workers
    return workers.model_copy(update={"chosen": chosen, "joint": joint})


@pytest.fixture
def path(workdir):
    return workdir / "p.toml"


def test_repeated_probe_keeps_measured_workers(path):
    kept = store.keep_workers(probed_again(), path)
    assert kept.train.data.num_workers == 1
    assert kept.evidence.workers == EXAMPLE.evidence.workers
    # The same profile is not kept a second time.
    assert store.write_profile(path, kept) is None


def test_repeated_probe_keeps_adopted_loader_settings(path):
    swept = add_workers(EXAMPLE, swept_to(3, adopted=True), RUNNER)
    path.write_text(profile_to_toml(swept))
    assert store.keep_workers(probed_again(), path).train.data == swept.train.data


def test_other_micro_batch_loses_measured_workers(path):
    profile = store.keep_workers(probed_again(micro_batch_size=1), path)
    assert profile.evidence.workers is None


def test_writing_keeps_a_different_profile(path):
    profile = probed_again(micro_batch_size=1)
    kept = store.write_profile(path, profile)
    assert store.read_profile(kept).profile == EXAMPLE
    assert store.read_profile(path).profile == profile


def test_writing_keeps_an_unreadable_file(path):
    path.write_text("mine = 1\n")
    assert store.write_profile(path, EXAMPLE).read_text() == "mine = 1\n"
    assert store.read_profile(path).profile == EXAMPLE


def test_rejects_micro_batch_not_verified_to_fit(path):
    text = path.read_text()
    path.write_text(text.replace("micro_batch_size = 2", "micro_batch_size = 3"))
    with pytest.raises(ProfileRejected, match="exceeds 2, the largest"):
        require_local_probe(store.read_profile(path))


def test_rejects_rates_of_a_pretended_gpu(path):
    driver = '[fingerprint]\ndriver = "0.0 (nullgpu)"'
    path.write_text(path.read_text().replace("[fingerprint]", driver))
    with pytest.raises(
        MachineLacks, match="a profile's tokens/s cannot be measured on a pretended"
    ):
        store.read_profile(path)


@pytest.mark.parametrize(
    ("adopted", "settings"),
    [
        (None, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
        (True, {"num_workers": 5, "prefetch_factor": 8, "pin_memory": False}),
        (False, {"num_workers": 3, "prefetch_factor": 2, "pin_memory": True}),
    ],
    ids=["no joint search", "adopted", "not adopted"],
)
def test_sweep_writes_its_loader_settings(adopted, settings):
    workers = swept_to(3, adopted=adopted)
    profile = add_workers(EXAMPLE, workers, RUNNER)
    assert profile.train.data == EXAMPLE.train.data.model_copy(update=settings)
    assert profile.evidence.workers == workers
    assert profile.evidence.probe == EXAMPLE.evidence.probe


def test_repeated_sweep_is_named_once():
    profile = add_workers(EXAMPLE, swept_to(2), RUNNER)
    profile = add_workers(profile, swept_to(3), RUNNER)
    assert profile.train.data.num_workers == 3
    assert profile.evidence.workers == swept_to(3)
    assert profile.provenance.commands == ["probe", "workers"]


BASELINE = BaselineEvidence(
    rows=[RecipeRow(name="tuned", tokens_per_s=[9.0], speedup=1.0, outcome="ran")],
    local_ranks=1,
    window_s=2.0,
    windows=1,
    seconds=3.0,
)


@pytest.fixture
def compared():
    """Return the example with the evidence of a baseline."""
    return add_evidence(EXAMPLE, "baseline", BASELINE, RUNNER)


def test_baseline_changes_no_settings(compared):
    assert compared.train == EXAMPLE.train
    assert compared.evidence.baseline == BASELINE
    assert compared.provenance.commands == ["probe", "baseline"]


def test_baseline_is_kept_with_its_settings(compared):
    profile = add_workers(compared, swept_to(1), RUNNER)
    assert profile.evidence.baseline == BASELINE
    assert profile.provenance.commands == ["probe", "baseline", "workers"]


def test_baseline_is_dropped_with_its_settings(compared):
    profile = add_workers(compared, swept_to(2), RUNNER)
    assert profile.evidence.baseline is None
    assert profile.provenance.commands == ["probe", "workers"]


def test_profile_without_trial_log_has_no_trials(tmp_path):
    trials = read_trials(tmp_path / "p.toml", EXAMPLE, tmp_path)
    assert trials.finished == ()
    assert trials.corrupt_lines == 0
    assert trials.check.found == "no trials"


NEWEST_UTC = "2026-01-02T00:00:00+00:00"
OWN = (*example_records(), record(time_utc=NEWEST_UTC, key="newest"))
OTHER = record(site="there", dataset_hash="e", time_utc="2026-01-03T00:00:00+00:00")


@pytest.fixture
def trial_log(tmp_path):
    """Return a trial log with trials of two profiles of one name."""
    trial_log = TrialLog(tmp_path / "p" / "trials", "w")
    for trial in (*OWN, OTHER):
        trial_log.append(trial.model_dump(mode="json"))
    return trial_log


def test_provenance_covers_own_trials(trial_log):
    runner = SimpleNamespace(trial_log=trial_log)
    provenance = add_workers(EXAMPLE, swept_to(3), runner).provenance
    records, _ = read_trial_records(trial_log.directory)
    own = [record for record in records if record.site == "here"]
    assert len(own) == len(OWN)
    assert provenance.trial_log_sha256 == trial_log_sha256(own)
    assert provenance.trial_log_until_utc == NEWEST_UTC


@pytest.mark.parametrize(
    ("path", "dataset_hash", "own", "others"),
    [("a/p.toml", "d", len(OWN), 1), ("b/p.toml", "e", 1, len(OWN))],
)
def test_profiles_of_one_name_have_their_own_trials(
    tmp_path, trial_log, path, dataset_hash, own, others
):
    trial_log.append({"no": "trial"})
    profile = but(EXAMPLE, fingerprint={"dataset_hash": dataset_hash})
    trials = read_trials(tmp_path / path, profile, tmp_path)
    assert len(trials.finished) == own
    assert trials.corrupt_lines == 1
    assert trials.check.others == others


HOST = FakeHost(versions={"torch": "2.13.0", "transformers": "5.23.0"})


@pytest.fixture
def verify_on(tmp_path, monkeypatch, patterned_dataset):
    """Return a function that verifies a profile on a machine with these GPUs.

    The profile was made on an H200 and CUDA 13.0.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    manifest = read_manifest(patterned_dataset)
    site = open_device(
        "cuda", patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=H200)])
    )
    made_on = fingerprint(site, EXAMPLE.train.model, manifest, "13.0")
    data = EXAMPLE.train.data.model_copy(update={"dataset_hash": manifest.dataset_hash})
    profile = but(EXAMPLE, train={"data": data, "device": "cuda"})
    profile = profile.model_copy(update={"fingerprint": made_on})
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(profile))

    def verify_with(*gpus, cuda="13.0"):
        monitor = FakeGpuMonitor([FakeGpu(facts=gpu) for gpu in gpus])
        return verify_profile(
            read_with_approval(path, tmp_path / "reports"),
            patterned_dataset,
            HOST,
            monitor,
            lambda: cuda,
        )

    return verify_with


def differences(verification):
    return [
        (check.found, check.field)
        for check in verification.checks
        if check.found != "same"
    ]


def test_accepts_the_same_gpu(verify_on):
    verification = verify_on(H200)
    assert differences(verification) == []
    verification.raise_if_bad("p.toml")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "NVIDIA H100 NVL"}, "gpu_name"),
        ({"total_bytes": 2**30}, "gpu_total_bytes"),
        ({"mig_enabled": True}, "gpu_mig"),
    ],
)
def test_rejects_another_gpu(verify_on, changes, field):
    verification = verify_on(replace(H200, **changes))
    assert differences(verification) == [("error", field)]
    with pytest.raises(ProfileRejected, match=field):
        verification.raise_if_bad("p.toml")


@pytest.mark.parametrize(
    ("fields", "docs"),
    [
        (["dataset_hash"], "dataset-mismatch"),
        (["dataset_hash", "gpu_name"], "profile-mismatch"),
        (["model_sha256"], "profile-mismatch"),
    ],
)
def test_mismatch_links_its_own_help(fields, docs):
    checks = tuple(
        Check(field=field, found="error", profile="a", here="b") for field in fields
    )
    with pytest.raises(ProfileRejected) as raised:
        Verification(checks=checks).raise_if_bad("p.toml")
    assert raised.value.docs == docs
    assert "autotune tune --model MODEL --data DIR" in raised.value.next_step


@pytest.mark.parametrize(
    ("changes", "cuda", "field"),
    [
        ({}, "12.8", "cuda"),
        ({"driver": "570.0"}, "13.0", "driver"),
        ({"power_cap_w": 500.0}, "13.0", "gpu_power_cap_w"),
    ],
)
def test_warns_of_another_state_of_the_gpu(verify_on, changes, cuda, field):
    verification = verify_on(replace(H200, **changes), cuda=cuda)
    assert differences(verification) == [("warning", field)]
    verification.raise_if_bad("p.toml")


def test_machine_without_gpu_is_not_checkable(verify_on):
    verification = verify_on()
    unknown = {check.field for check in verification.with_result("unknown")}
    assert unknown >= {
        "device",
        "gpu_name",
        "driver",
        "cuda",
        "cpu_model",
        "ram_total_bytes",
        "data_filesystem",
    }
    same = {check.field for check in verification.with_result("same")}
    assert same >= {"model_sha256", "dataset_hash", "torch", "content"}
    with pytest.raises(NotCheckable, match="gpu_name"):
        verification.raise_if_bad("p.toml")


def test_approval_belongs_to_the_content(path):
    review(path, path.parent, "approved", by="reviewer", note=None)
    copy = path.parent / "other" / "p.toml"
    copy.parent.mkdir()
    copy.write_text(path.read_text())
    assert require_approved(copy, path.parent).approval.state == "approved"


def test_review_without_permission_is_not_corrupt(path, deny_reading):
    review_file = review_path(path, path.parent)
    review_file.parent.mkdir()
    review_file.write_text("{}")
    deny_reading("review.json")
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        read_with_approval(path, path.parent)
    assert "backup" not in raised.value.next_step


def test_profile_without_permission_is_not_missing(path, deny_reading):
    deny_reading(path.name)
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        store.read_profile(path)
    assert str(path) in raised.value.next_step


def test_rejects_unreadable_review(path):
    review_file = review_path(path, path.parent)
    review_file.parent.mkdir()
    review_file.symlink_to(review_file)
    with pytest.raises(BadInput, match="cannot read"):
        read_with_approval(path, path.parent)
