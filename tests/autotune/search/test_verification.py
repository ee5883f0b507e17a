from dataclasses import replace

import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import NotCheckable, ProfileRefused
from autotune.search.reviews import read_reviewed
from autotune.search.site import fingerprint, open_site
from autotune.search.verification import verify
from tests.autotune.profiles import example_profile
from tests.autotune.search.test_site import H200
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from trainer.dataset import read_manifest

HOST = FakeHost(versions={"torch": "2.13.0", "transformers": "5.23.0"})


@pytest.fixture
def of_gpu(tmp_path, monkeypatch, patterned_dataset):
    """A function that writes a profile made with this GPU and CUDA 13.0, and holds it against another machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = example_profile()
    manifest = read_manifest(patterned_dataset)
    site = open_site("cuda", patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=H200)]))
    made_on = fingerprint(site, found.train.model, manifest, "13.0")
    data = found.train.data.model_copy(update={"dataset_hash": manifest.dataset_hash})
    train = found.train.model_copy(update={"data": data, "device": "cuda"})
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(found.model_copy(update={"train": train, "fingerprint": made_on})))

    def check(*gpus, cuda="13.0"):
        stored = read_reviewed(path, tmp_path / "reports")
        return verify(
            stored, patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=gpu) for gpu in gpus]), lambda: cuda
        )

    return check


def test_the_same_gpu_is_the_same(of_gpu):
    found = of_gpu(H200)
    assert {check.found for check in found.checks} == {"same"}
    found.raise_if_bad("p.toml")


@pytest.mark.parametrize(
    ("gpu", "field"),
    [(replace(H200, name="NVIDIA H100 NVL"), "gpu_name"), (replace(H200, total_bytes=2**30), "gpu_total_bytes"),
     (replace(H200, mig_enabled=True), "gpu_mig")],
)  # fmt: skip
def test_a_gpu_that_the_figures_are_not_of_is_refused(of_gpu, gpu, field):
    found = of_gpu(gpu)
    assert [check.field for check in found.of("refuse")] == [field]
    with pytest.raises(ProfileRefused, match=field):
        found.raise_if_bad("p.toml")


@pytest.mark.parametrize(
    ("gpu", "cuda", "field"),
    [(H200, "12.8", "cuda"), (replace(H200, driver="570.0"), "13.0", "driver"),
     (replace(H200, power_cap_w=500.0), "13.0", "gpu_power_cap_w")],
)  # fmt: skip
def test_lesser_differences_are_told(of_gpu, gpu, cuda, field):
    found = of_gpu(gpu, cuda=cuda)
    assert [check.field for check in found.of("warn")] == [field]
    found.raise_if_bad("p.toml")


def test_without_a_gpu_the_machine_is_not_checkable_and_the_rest_is(of_gpu):
    found = of_gpu()
    unknown = {check.field for check in found.of("not checkable here")}
    assert {"device", "gpu_name", "driver", "cuda", "cpu_model", "ram_total_bytes", "data_filesystem"} <= unknown
    assert {"model_sha256", "dataset_hash", "torch", "content"} <= {check.field for check in found.of("same")}
    with pytest.raises(NotCheckable, match="gpu_name"):
        found.raise_if_bad("p.toml")
