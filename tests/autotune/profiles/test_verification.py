from dataclasses import replace

import pytest

from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.profile import model_sha256
from autotune.machine.measured_device import open_device
from autotune.profiles.approval import read_with_approval
from autotune.profiles.checks import Check, Verification
from autotune.profiles.toml_file import profile_to_toml
from autotune.profiles.verification import verify_profile
from autotune.trials.fingerprint import fingerprint
from testbed.examples.gpu_facts import H200
from testbed.examples.profiles import but, example_profile
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from trainer.formats.manifest import read_manifest

EXAMPLE = example_profile()
HOST = FakeHost(versions={"torch": "2.13.0", "transformers": "5.23.0"})


@pytest.fixture
def verify_on(tmp_path, monkeypatch, patterned_dataset):
    """Return a function that verifies a profile of an H200 on a machine.

    It takes the GPUs of the machine, and the CUDA version of its torch.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    manifest = read_manifest(patterned_dataset)
    site = open_device(
        "cuda", patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=H200)])
    )
    made_on = fingerprint(
        site,
        "13.0",
        model_sha256=model_sha256(EXAMPLE.train.model),
        dataset_hash=manifest.dataset_hash,
    )
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
    """Return result and field of each check that differs or is unknown."""
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
        pytest.param({"name": "NVIDIA H100 NVL"}, "gpu_name", id="model"),
        pytest.param({"total_bytes": 2**30}, "gpu_total_bytes", id="less memory"),
        pytest.param({"mig_enabled": True}, "gpu_mig", id="MIG"),
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
        pytest.param(["dataset_hash"], "dataset-mismatch", id="only dataset"),
        pytest.param(
            ["dataset_hash", "gpu_name"], "profile-mismatch", id="dataset and GPU"
        ),
        pytest.param(["model_sha256"], "profile-mismatch", id="model"),
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
        pytest.param({}, "12.8", "cuda", id="CUDA of torch"),
        pytest.param({"driver": "570.0"}, "13.0", "driver", id="driver"),
        pytest.param({"power_cap_w": 500.0}, "13.0", "gpu_power_cap_w", id="power cap"),
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
