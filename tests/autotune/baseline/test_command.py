import json

import pytest

from autotune.machine.host import SystemHost
from autotune.machine.measured_device import fingerprint, open_device
from autotune.machine.nvml import NvmlMonitor
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.datasets import write_dataset
from testbed.examples.profiles import example_profile
from trainer.config.train_config import DataSettings, ModelSettings, TrainConfig
from trainer.data.manifest import read_manifest

TINY = ModelSettings(
    name="tiny",
    config={
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
)


@pytest.fixture
def profile(workdir, monkeypatch):
    """A profile of this machine's CPU, whose packed sequences are half full."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    data = write_dataset(
        workdir / "data",
        [[5 + number % 100] * 30 for number in range(400)],
        vocab_size=128,
    )
    manifest = read_manifest(data)
    place = fingerprint(
        open_device("cpu", data, SystemHost(), NvmlMonitor()), TINY, manifest, None
    )
    train = TrainConfig(
        model=TINY,
        data=DataSettings(path="data", dataset_hash=manifest.dataset_hash),
        seq_length_tokens=64,
        layout="packed",
        micro_batch_size=2,
        global_batch_size=4,
    )
    profile = example_profile().model_copy(
        update={"train": train, "fingerprint": place}
    )
    (workdir / "p.toml").write_text(profile_to_toml(profile))
    return workdir / "p.toml"


@pytest.mark.usefixtures("warm_server")
def test_writes_measured_windows_into_the_profile(profile, says):
    other_data = write_dataset(profile.parent / "other", [[6] * 9] * 50, vocab_size=128)
    assert "dataset_hash" in says("baseline", profile, "--data", other_data, code=6)
    command = ["baseline", str(profile), "--window", "0.1s", "--rounds", "1", "--json"]
    printed = json.loads(says(*command))
    rows = {row["name"]: row for row in printed["rows"]}
    read = {
        name: (row["outcome"], len(row["tokens_per_s"])) for name, row in rows.items()
    }
    assert read == dict.fromkeys(("paper", "hf-trainer", "tuned"), ("ran", 1))
    for name, *values in (
        ("hf-trainer", "layout", "dynamic", "packed"),
        ("paper", "mlm_head", "dense", "sparse"),
    ):
        difference = dict(
            zip(("key", "theirs", "tuned", "reason"), (*values, None), strict=True)
        )
        assert difference in rows[name]["differences"]
    stored = read_profile(profile)
    assert stored.intact
    assert stored.profile.evidence.baseline.model_dump() == printed
    assert stored.profile.provenance.commands == ["probe", "baseline"]
    trial_log = list((profile.parent / "reports" / "p" / "trials").iterdir())
    # The trial log keeps milliseconds.
    assert json.loads(says(*command)) | {"seconds": 0} == printed | {"seconds": 0}
    assert list((profile.parent / "reports" / "p" / "trials").iterdir()) == trial_log


@pytest.mark.usefixtures("warm_server")
def test_writes_chosen_workers_into_the_profile(profile, says):
    printed = json.loads(
        says("workers", profile, "--window", "0.1s", "--max-workers", "1", "--json")
    )
    stored = read_profile(profile)
    assert stored.intact
    assert stored.profile.train.data.num_workers == printed["chosen"]
    assert stored.profile.evidence.workers.model_dump() == printed
    assert stored.profile.provenance.commands == ["probe", "workers"]
