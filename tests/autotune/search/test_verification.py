import contextlib
from dataclasses import replace

import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import BadInput, NotCheckable, ProfileRefused
from autotune.search.reviews import read_reviewed, require_approved, review, review_path
from autotune.search.site import fingerprint, open_site
from autotune.search.verification import verify
from tests.autotune.profiles import but, example_profile
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
    path = tmp_path / "p.toml"
    made = but(found, train={"data": data, "device": "cuda"}).model_copy(update={"fingerprint": made_on})
    path.write_text(profile_to_toml(made))

    def check(*gpus, cuda="13.0"):
        stored = read_reviewed(path, tmp_path / "reports")
        return verify(
            stored, patterned_dataset, HOST, FakeGpuMonitor([FakeGpu(facts=gpu) for gpu in gpus]), lambda: cuda
        )

    return check


@pytest.mark.parametrize(
    ("changes", "cuda", "found", "field"),
    [
        ({}, "13.0", "same", None),
        ({"name": "NVIDIA H100 NVL"}, "13.0", "refuse", "gpu_name"),
        ({"total_bytes": 2**30}, "13.0", "refuse", "gpu_total_bytes"),
        ({"mig_enabled": True}, "13.0", "refuse", "gpu_mig"),
        ({}, "12.8", "warn", "cuda"),
        ({"driver": "570.0"}, "13.0", "warn", "driver"),
        ({"power_cap_w": 500.0}, "13.0", "warn", "gpu_power_cap_w"),
    ],
)
def test_a_gpu_that_the_figures_are_not_of_is_refused_and_lesser_differences_are_told(
    of_gpu, changes, cuda, found, field
):
    verified = of_gpu(replace(H200, **changes), cuda=cuda)
    assert [(one.found, one.field) for one in verified.checks if one.found != "same"] == [(found, field)] * bool(field)
    refused = pytest.raises(ProfileRefused, match=field) if found == "refuse" else contextlib.nullcontext()
    with refused:
        verified.raise_if_bad("p.toml")


def test_without_a_gpu_the_machine_is_not_checkable_and_the_rest_is(of_gpu):
    found = of_gpu()
    unknown = {check.field for check in found.of("not checkable here")}
    assert {"device", "gpu_name", "driver", "cuda", "cpu_model", "ram_total_bytes", "data_filesystem"} <= unknown
    assert {"model_sha256", "dataset_hash", "torch", "content"} <= {check.field for check in found.of("same")}
    with pytest.raises(NotCheckable, match="gpu_name"):
        found.raise_if_bad("p.toml")


def test_the_same_content_is_approved_wherever_it_lies(here):
    profile = here / "p.toml"
    review(profile, here, "approved", by="reviewer", note=None)
    other = here / "other" / "p.toml"
    other.parent.mkdir()
    other.write_text(profile.read_text())
    assert require_approved(other, here).standing.state == "approved"
    other.write_text(profile.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 1"))
    with pytest.raises(ProfileRefused, match="not approved any more"):
        require_approved(other, here)
    assert read_reviewed(profile, here).standing.state == "approved"


def test_a_review_that_cannot_be_read_is_no_absent_one(here):
    path = review_path(here / "p.toml", here)
    path.parent.mkdir()
    path.symlink_to(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_reviewed(here / "p.toml", here)
