import json

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.profiles import read_profile
from autotune.search.site import fingerprint, open_site
from tests.autotune.profiles import example_profile
from tests.conftest import write_dataset
from trainer.config import DataSettings, ModelSettings, TrainConfig
from trainer.dataset import read_manifest

TINY = ModelSettings(
    name="tiny",
    config={"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 64},
)  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A dataset of rows that are half full; no cluster anywhere near."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "AUTOTUNE_DATA"):
        monkeypatch.delenv(name, raising=False)
    return write_dataset(tmp_path / "data", [[5 + number % 100] * 30 for number in range(400)], vocab_size=128)


@pytest.fixture
def profile(data, tmp_path):
    """Probed here, as far as anybody can tell."""
    base, manifest = example_profile(), read_manifest(data)
    here = fingerprint(open_site("cpu", data, SystemHost(), NvmlMonitor()), TINY, manifest, None)
    train = TrainConfig(
        model=TINY, data=DataSettings(path="data", dataset_hash=manifest.dataset_hash), seq_length_tokens=64,
        layout="packed", micro_batch_rows=2, global_batch_rows=4,
    )  # fmt: skip
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(base.model_copy(update={"train": train, "fingerprint": here})))
    return path


@pytest.mark.usefixtures("warm_server")
def test_real_windows_are_written_into_the_profile_and_are_not_read_again(profile, capsys):
    command = ["baseline", "--profile", str(profile), "--window", "0.1", "--rounds", "1", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    read = {name: (row["outcome"], len(row["real_tokens_per_s"])) for name, row in rows.items()}
    assert read == dict.fromkeys(("paper", "hf-trainer", "tuned"), ("ran", 1))
    assert {"key": "layout", "theirs": "dynamic", "tuned": "packed", "reason": None} in rows["hf-trainer"][
        "differences"
    ]
    assert {"key": "head", "theirs": "dense", "tuned": "masked", "reason": None} in rows["paper"]["differences"]
    stored = read_profile(profile)
    assert stored.intact
    assert stored.profile.evidence.baseline.model_dump() == found
    assert stored.profile.provenance.commands == ["probe", "baseline"]
    ledger = list((profile.parent / "reports" / "p" / "ledger").iterdir())
    assert run(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert again | {"seconds": 0} == found | {"seconds": 0}  # the ledger keeps milliseconds
    assert list((profile.parent / "reports" / "p" / "ledger").iterdir()) == ledger


@pytest.mark.usefixtures("warm_server")
def test_a_profile_of_another_dataset_is_refused(profile, data, capsys):
    other = write_dataset(data.parent / "other", [[6] * 9] * 50, vocab_size=128)
    assert run(["baseline", "--profile", str(profile), "--data", str(other)]) == 6
    assert "dataset_hash" in capsys.readouterr().err


def test_a_profile_that_was_not_probed_is_refused(profile, capsys):
    base = example_profile()
    profile.write_text(
        profile_to_toml(base.model_copy(update={"evidence": base.evidence.model_copy(update={"probe": None})}))
    )
    assert run(["baseline", "--profile", str(profile)]) == 6
    assert "autotune probe --model CONFIG.json" in capsys.readouterr().err


def test_a_login_node_is_refused_with_the_job_to_submit_instead(profile, capsys, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert run(["baseline", "--profile", str(profile)]) == 5
    assert f"autotune baseline --profile {profile} --slurm" in capsys.readouterr().err


def test_the_job_says_the_same_on_one_node_with_the_cpus_of_the_probe(profile, capsys):
    assert run(["baseline", "--profile", str(profile), "--minutes", "3", "--slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    cpus = read_profile(profile).profile.fingerprint.allotted_cpus
    assert "#SBATCH --nodes=1" in script
    assert f"#SBATCH --cpus-per-task={cpus}" in script
    assert "--gres" not in script
    assert f"baseline --profile {profile} --minutes 3" in script.replace("\\\n", "")


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--window", "0"], ["--minutes", "0"], ["--ranks", "0"]])
def test_an_option_that_makes_no_sense_is_a_usage_error(profile, capsys, option):
    assert run(["baseline", "--profile", str(profile), *option]) == 2
    assert option[0] in capsys.readouterr().err
