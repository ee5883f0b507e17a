"""``profile export``: settings, remarks and errors of the command."""

import json

import pytest

from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from tests.autotune.subjects.mlm.export.exports import export_to


@pytest.fixture
def packed(workdir):
    """Write a profile of packed sequences."""
    train = {"layout": "packed", "seq_length_tokens": 64, "global_batch_size": 32}
    profile = but(example_profile(), train=train)
    (workdir / "p.toml").write_text(profile_to_toml(profile))


def test_counts_samples_of_packed_sequences(packed, capsys, patterned_dataset):
    data = ("--data", str(patterned_dataset))
    export_to("hf-trainer", "p.toml", *data, "--json")
    out, err = capsys.readouterr()
    assert err == ""
    batch = json.loads(out)["batch"]
    # Samples have 8 to 39 tokens and two special ones, 26 on average: two or three are
    # packed into 64 tokens.
    assert 2 < batch["samples_per_sequence"] < 3
    wanted_samples = 32 * batch["samples_per_sequence"]
    difference = abs(batch["exported_samples_per_step"] - wanted_samples)
    # Half a sample by rounding in each micro-batch, and half in the whole step.
    assert difference <= 0.5 * batch["gradient_accumulation_steps"] + 0.5
    share_of_samples = batch["exported_samples_per_step"] / wanted_samples
    assert batch["exported_tokens_per_step"] == pytest.approx(
        share_of_samples * batch["tokens_per_step"]
    )


def test_export_prints_settings_with_remarks_on_stderr(packed, capsys):
    export_to("hf-trainer", "p.toml")
    out, err = capsys.readouterr()
    assert json.loads(out)["per_device_train_batch_size"] == 2
    for words in (
        "No equivalent:",
        "cross-document attention",
        "warning: The number of samples per",
        "--data",
    ):
        assert words in err


def test_export_writes_settings_with_remarks(packed, workdir, says, capsys):
    export_to("hf-trainer", "p.toml")
    printed = json.loads(capsys.readouterr().out)
    export = ("profile", "export", "p.toml", "--to", "hf-trainer")
    assert "hf/settings.remarks.json" in says(*export, "--out", "hf/settings.json")
    settings = json.loads((workdir / "hf/settings.json").read_text())
    remarks = json.loads((workdir / "hf/settings.remarks.json").read_text())
    assert remarks["arguments"] == settings == printed
    lost = {
        setting["setting"]
        for setting in remarks["settings"]
        if setting["equivalence"] == "none"
    }
    assert lost >= {"layout", "mlm_head"}


def test_rejects_unknown_target(packed, says):
    export = ("profile", "export", "p.toml", "--to", "axolotl")
    assert "hf-trainer" in says(*export, code=2)
