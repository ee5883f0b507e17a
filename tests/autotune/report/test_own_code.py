"""Reports of your own training code, alone and beside the bundled trainer."""

import json

import pytest

from autotune.base.render_console import console_text
from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.probe import CurvePoint
from autotune.evidence.profile import Constraints, Evidence
from autotune.profiles.store import read_profile, write_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.report.sections import summary_table
from testbed.examples.own_profiles import own_profile, own_sweep, probed_only
from testbed.examples.profiles import but

EXAMPLE = own_profile()


@pytest.fixture
def path(workdir):
    path = workdir / "mine.toml"
    write_profile(path, EXAMPLE)
    return path


@pytest.fixture
def built(says, workdir):
    """Return a function that builds a report and returns its facts and Markdown."""

    def call(*words):
        says("report", *words, "--out", "a")
        facts = json.loads((workdir / "a.json").read_text())
        return facts, (workdir / "a.md").read_text()

    return call


def test_report_has_every_measured_part(path, built):
    facts, markdown = built(path)
    assert "# Tuning report: mine:build_step (seq_length=64)" in markdown
    assert "batch 7 · num_workers 1" in markdown
    assert "Memory by batch" in markdown
    assert "Throughput by num_workers" in markdown
    assert "source of the step, hash" in markdown
    (profile,) = facts["profiles"]
    assert profile["profile"]["settings"] == EXAMPLE.settings
    assert profile["commands"] == [
        "autotune probe --step mine:build_step --set seq_length=64 --along batch"
        f" --memory 1GiB --out {path}",
        f"autotune workers {path} --loader mine:build_loader",
    ]


@pytest.mark.parametrize("lacking", ["probe", "workers"])
def test_missing_part_names_its_command(path, built, lacking):
    path.write_text(profile_to_toml(but(EXAMPLE, evidence={lacking: None})))
    facts, _ = built(path)
    commands = [command for part in facts["missing"] for command in part["commands"]]
    name = {"probe": "autotune probe", "workers": "autotune workers"}[lacking]
    assert any(command.startswith(name) for command in commands)


def test_kernels_are_confirmed(path, built):
    facts, _ = built(path)
    [kernels] = [part for part in facts["missing"] if part["section"] == "Kernels"]
    assert kernels["commands"] == [f"autotune confirm {path}"]


@pytest.mark.parametrize(("unit", "words"), [(None, "tokens"), ("images", "images")])
def test_rate_has_the_unit_of_its_windows(path, built, unit, words):
    rates = {
        "micro_batch_size": 7,
        "gradient_accumulation_steps": 1,
        "micro_batches_measured": 1,
        "tokens_per_s": [90.0, 100.0, 110.0],
    }
    confirm = ConfirmEvidence(
        rows=[SplitRates(**rates)],
        unit=unit,
        num_workers=1,
        local_ranks=1,
        promised_tokens_per_s=100.0,
        promised_low=90.0,
        promised_high=110.0,
        not_delivered="a test",
        window_s=2.0,
        windows=3,
        seconds=7.0,
    )
    path.write_text(profile_to_toml(but(EXAMPLE, evidence={"confirm": confirm})))
    _, markdown = built(path)
    assert f"**100 {words}/s** (90 to 110, 1 rank)" in markdown
    assert f"{words}/s" in console_text((summary_table([read_profile(path).profile]),))


def test_curve_has_the_units_of_your_code(path, built):
    points = [
        CurvePoint(size=size, units_per_s=100.0 * size, step_s=0.01, timed_steps=4)
        for size in (1, 2, 4)
    ]
    changes = {"curve": points, "knee_micro_batch_sizes": [2, 4]}
    probe = EXAMPLE.evidence.probe.model_copy(update=changes)
    path.write_text(profile_to_toml(but(EXAMPLE, evidence={"probe": probe})))
    _, markdown = built(path)
    assert "Throughput by batch" in markdown
    assert "samples/s: 100 at 1, 400 at 4" in markdown
    assert "incl. padding" not in markdown
    assert "Throughput levels off between batch=2 and batch=4" in markdown


def test_report_recommends_changes(path, built):
    starved = EXAMPLE.model_copy(
        update={"settings": {**EXAMPLE.settings, "num_workers": 0}}
    )
    path.write_text(profile_to_toml(starved))
    facts, markdown = built(path)
    rules = [advice["rule"] for advice in facts["profiles"][0]["advice"]]
    assert "more-workers" in rules
    assert "num_workers = 1" in markdown
    assert "data loading" in markdown


def test_profile_without_evidence_has_a_report(path, built):
    bare = {"evidence": Evidence(), "constraints": Constraints()}
    path.write_text(profile_to_toml(EXAMPLE.model_copy(update=bare)))
    facts, _ = built(path)
    assert facts["profiles"][0]["quality"]["grade"] == "low"


def test_sweep_without_windows_counts_as_missing(path, built):
    sweep = own_sweep().model_copy(update={"rows": []})
    path.write_text(profile_to_toml(but(EXAMPLE, evidence={"workers": sweep})))
    facts, _ = built(path)
    assert "Data loading" in [part["section"] for part in facts["missing"]]


def test_report_beside_the_bundled_trainer(path, built):
    facts, markdown = built(path, "p.toml")
    assert len(facts["profiles"]) == 2
    assert "mine:build_step (seq_length=64), tiny" in markdown
    assert "Throughput by micro_batch_size" in markdown


def test_pull_request_names_the_next_command(path, says):
    path.write_text(profile_to_toml(probed_only(EXAMPLE)))
    lines = says("report", path, "--format", "pr")
    assert f"autotune workers {path} --loader MODULE:build_loader" in lines
