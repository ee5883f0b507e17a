"""Comparisons of profiles of your own training code."""

import json

import pytest

from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.own_profiles import own_profile, own_subject
from testbed.examples.profiles import but

EXAMPLE = own_profile()


@pytest.fixture
def compared(says, workdir):
    """Return a function that compares the example with another profile."""

    def call(profile, *words):
        (workdir / "a.toml").write_text(profile_to_toml(EXAMPLE))
        (workdir / "b.toml").write_text(profile_to_toml(profile))
        answer = json.loads(says("compare", "a.toml", "b.toml", "--json", *words))
        return answer["comparisons"][0]

    return call


def figures_of(comparison):
    return {
        (figure["metric"]["name"], figure["of"]): figure["verdict"]
        for figure in comparison["figures"]
    }


def test_same_profiles_do_not_differ(compared):
    comparison = compared(EXAMPLE)
    assert comparison["settings"] == comparison["facts"] == []
    assert set(figures_of(comparison).values()) <= {
        "the same",
        "the same within noise",
        "not judged",
    }


def test_larger_size_and_faster_loader_show(compared):
    probe = EXAMPLE.evidence.probe
    curve = [
        point.model_copy(
            update={
                name: 2 * getattr(point, name)
                for name in (
                    "units_per_s",
                    "units_per_s_low",
                    "units_per_s_high",
                )
            }
        )
        for point in probe.curve
    ]
    probe = probe.model_copy(
        update={"feasible_max": 16, "infeasible_min": 17, "curve": curve}
    )
    loader = EXAMPLE.evidence.workers
    rows = [
        row.model_copy(update={"units_per_s": [2 * rate for rate in rates]})
        for row in loader.rows
        if (rates := row.units_per_s)
    ]
    loader = loader.model_copy(update={"rows": rows})
    comparison = compared(but(EXAMPLE, evidence={"probe": probe, "workers": loader}))
    figures = figures_of(comparison)
    assert figures["largest batch", "under the budget"] == "more"
    assert figures["batches/s", "1 DataLoader worker"] == "faster"
    assert comparison["headline"]["metric"]["name"] == "samples/s"
    assert comparison["headline"]["verdict"] == "faster"


def test_other_source_stays_comparable(compared):
    sources = {"step": "7" * 64, "loader": "6" * 64}
    comparison = compared(but(EXAMPLE, subject={"sources": sources}))
    assert [fact["key"] for fact in comparison["facts"]] == ["source of the step"]
    assert "not comparable" not in figures_of(comparison).values()


def test_other_arguments_are_settings(compared):
    subject = own_subject(seq_length=128)
    comparison = compared(EXAMPLE.model_copy(update={"subject": subject}))
    assert comparison["settings"] == [
        {"key": "arguments.seq_length", "old": 64, "new": 128}
    ]


def test_other_function_is_not_comparable(compared):
    table = EXAMPLE.subject.table | {"step_function": "mine:other_step"}
    comparison = compared(but(EXAMPLE, subject={"table": table}))
    assert set(figures_of(comparison).values()) == {"not comparable"}


def test_trainer_profile_is_not_comparable(says, workdir):
    (workdir / "a.toml").write_text(profile_to_toml(EXAMPLE))
    shown = says("compare", "a.toml", "p.toml")
    assert "mine:build_step" in shown
    assert "not comparable (another unit): training speed" in shown
    assert " samples/s and " in shown
    # Settings of two subjects have few names in common.
    assert "subject.kind" in shown
    assert "learning_rate" not in shown


def test_slower_loader_slows_the_training_speed(compared):
    loader = EXAMPLE.evidence.workers
    rows = [
        row.model_copy(update={"ratio_to_cached": row.ratio_to_cached / 2})
        for row in loader.rows
    ]
    slower = loader.model_copy(update={"rows": rows})
    headline = compared(but(EXAMPLE, evidence={"workers": slower}))["headline"]
    assert headline["verdict"] == "slower"
    assert headline["change"]["value"] == pytest.approx(0.5)
