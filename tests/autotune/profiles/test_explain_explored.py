"""Explanations of settings that an exploration varied."""

import pytest

from autotune.evidence.explore import ExploredConfiguration
from autotune.subjects.mlm.settings import choice_words
from testbed.examples.profiles import but
from testbed.examples.tuning import example_profile
from tests.autotune.profiles.explanations import explain

EXPLORED = example_profile(dataset_hash="d")
"""Profile whose exploration kept the starting configuration of size 64."""
# The example's network tuning split the global batch by size 64: without it, the
# exploration or the probe decides the size.
KEPT = but(EXPLORED, evidence={"network": None})
"""The same, without network tuning."""


def adopted_profile(**train):
    """Return a profile whose exploration adopted compiled layers and size 32.

    Args:
        train: Settings that were edited since.
    """
    explore = EXPLORED.evidence.explore
    settings = explore.candidate.settings | {"micro_batch_size": 32}
    name = choice_words(settings)
    chosen = ExploredConfiguration(name=name, settings=settings)
    rows = [row for row in explore.rows if row.settings != explore.candidate.settings]
    chosen_row = {"name": name, "settings": settings, "ratio_to_starting": 1.3}
    rows.append(rows[0].model_copy(update=chosen_row))
    adopted = explore.model_copy(
        update={
            "adopted": True,
            "chosen": chosen,
            "candidate": chosen,
            "ratio_to_starting": 1.3,
            "ratio_low": 1.2,
            "ratio_high": 1.4,
            "choice": "verified to be faster",
            "rows": rows,
        }
    )
    settings = {"compile": True, "micro_batch_size": 32, **train}
    return but(EXPLORED, train=settings, evidence={"explore": adopted, "network": None})


def test_adopted_setting_has_its_ratio():
    explanation = explain(adopted_profile(), "compile")
    assert explanation.value is True
    assert explanation.origin == "measured"
    assert (
        explanation.because
        == "joint search of the step's settings: verified to be faster"
    )
    (ratio,) = explanation.evidence
    assert ratio.value == 1.3
    assert ratio.low == 1.2
    assert ratio.high == 1.4
    assert ratio.confidence == 0.98
    assert ratio.known == "measured"


def test_adopted_micro_batch_also_has_the_probes_figures():
    evidence = explain(adopted_profile(), "micro_batch_size").evidence
    names = [figure.name for figure in evidence]
    assert "largest that fits" in names
    assert (
        names[0]
        == "32 packed sequences, bf16, compiled, relative to the starting configuration"
    )


@pytest.mark.parametrize(
    ("key", "value", "rejected"),
    [
        pytest.param(
            "activation_checkpointing",
            "none",
            "full: at best 0.720 times the starting configuration, with 64 packed"
            " sequences, bf16, full checkpointing",
            id="checkpointing",
        ),
        pytest.param(
            "layout",
            "packed",
            "bucketed: at best 0.910 times the starting configuration, with 64 bucketed"
            " sequences, bf16",
            id="layout",
        ),
    ],
)
def test_setting_kept_by_a_search_is_measured(key, value, rejected):
    explanation = explain(KEPT, key)
    assert explanation.value == value
    assert explanation.origin == "measured"
    assert "was not verified to be faster" in explanation.because
    assert explanation.rejected == (rejected,)


@pytest.mark.parametrize(
    ("key", "starting"), [("micro_batch_size", "64"), ("compile", "false")]
)
def test_starting_value_is_named_as_rejected(key, starting):
    explanation = explain(adopted_profile(), key)
    assert explanation.origin == "measured"
    words = "no configuration with it was faster than the starting one, which has it"
    assert explanation.rejected[0] == f"{starting}: {words}"


@pytest.mark.parametrize(
    ("key", "changed"), [("micro_batch_size", 8), ("compile", False)]
)
def test_later_change_of_an_adopted_setting(key, changed):
    explanation = explain(adopted_profile(**{key: changed}), key)
    assert explanation.origin == "changed"
    assert "was chosen; joint search" in explanation.because


def test_unexplored_setting_was_requested():
    assert explain(KEPT, "precision").origin == "requested"


def test_micro_batch_not_adopted_is_the_probes():
    explanation = explain(KEPT, "micro_batch_size")
    assert explanation.because.endswith(KEPT.evidence.probe.choice)


def test_setting_that_did_not_run_has_its_outcome():
    assert explain(EXPLORED, "attention").rejected == ("sdpa: crashed",)


def test_gradient_sync_that_split_the_batch_says_so():
    network = EXPLORED.evidence.network
    split = network.gradient_syncs[0].model_copy(update={"micro_batch_size": 16})
    network = network.model_copy(update={"gradient_syncs": [split]})
    profile = but(adopted_profile(micro_batch_size=16), evidence={"network": network})
    explanation = explain(profile, "micro_batch_size")
    assert "split of the global batch by" in explanation.because
