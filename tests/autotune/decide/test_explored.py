import pytest

from autotune.core.evidence import ExchangeRow
from autotune.decide.explain import explanations, of_key
from autotune.decide.explored import explored_setting
from tests.autotune.show.report.example import example_profile


def explored(*, adopted=False, **train):
    """The example, in which compiled layers were tried, and taken where that is said."""
    profile = example_profile("d")
    found = profile.evidence.explore
    if adopted:
        chosen = found.candidate.model_copy(update={"micro_batch_rows": 32})
        rows = [row for row in found.rows if row.settings != found.candidate]
        rows.append(rows[0].model_copy(update={"settings": chosen, "ratio_to_unexplored": 1.3}))
        found = found.model_copy(
            update={
                "adopted": True, "chosen": chosen, "candidate": chosen, "ratio_to_unexplored": 1.3, "ratio_low": 1.2,
                "ratio_high": 1.4, "choice": "proven to be faster", "rows": rows,
            }
        )  # fmt: skip
        train = {"compile_layers": True, "micro_batch_rows": 32} | train
    evidence = profile.evidence.model_copy(update={"explore": found, "network": None})
    return profile.model_copy(update={"train": profile.train.model_copy(update=train), "evidence": evidence})


def of(profile, key):
    (found,) = of_key(explanations(profile), key)
    return found


def test_what_was_taken_has_its_proof():
    found = of(explored(adopted=True), "compile_layers")
    assert (found.value, found.origin) == (True, "measured")
    assert found.because == "explored together with other settings of the step: proven to be faster"
    (proof,) = found.evidence
    assert (proof.value, proof.low, proof.high, proof.confidence) == (1.3, 1.2, 1.4, 0.98)
    assert proof.known == "measured"


def test_what_stayed_after_a_search_was_measured_and_is_no_mere_default():
    found = of(explored(), "checkpointing")
    assert (found.value, found.origin) == ("none", "measured")
    assert "is not proven to be faster" in found.because
    assert found.rejected == ("full: at best 0.720 times the unexplored settings, with 64 packed rows, bf16, full "
                              "checkpointing",)  # fmt: skip


def test_values_that_did_not_run_say_what_became_of_them():
    found = explored_setting(explored().evidence.explore, "layout")
    assert found is not None
    assert found.chosen == "packed"
    assert found.rejected == ("bucketed: at best 0.910 times the unexplored settings, with 64 bucketed rows, bf16",)
    other = explored_setting(example_profile("d").evidence.explore, "attention")
    assert other is not None
    assert other.rejected == ("sdpa: crashed",)


@pytest.mark.parametrize(("key", "value"), [("micro_batch_rows", "64"), ("compile_layers", "false")])
def test_the_value_that_was_left_is_named_as_the_unexplored_one(key, value):
    found = of(explored(adopted=True), key)
    assert found.origin == "measured"
    words = "nothing with it was faster than the unexplored settings, which have it"
    assert found.rejected[0] == f"{value}: {words}"


def test_the_micro_batch_has_the_figures_of_its_memory_beside_those_of_the_search():
    names = [figure.name for figure in of(explored(adopted=True), "micro_batch_rows").evidence]
    assert "largest that fits" in names
    assert names[0] == "32 packed rows, bf16, compiled, to the unexplored"


@pytest.mark.parametrize(("key", "value"), [("compile_layers", False), ("micro_batch_rows", 8)])
def test_what_somebody_changed_afterwards_is_said_to_be(key, value):
    found = of(explored(adopted=True, **{key: value}), key)
    assert found.origin == "changed"
    assert "was chosen; explored together" in found.because


def test_a_setting_that_had_no_other_value_is_explained_as_without_a_search():
    assert explored_setting(explored().evidence.explore, "precision") is None
    assert of(explored(), "precision").origin == "asked for"


def test_where_nothing_was_taken_the_probe_still_says_why_the_micro_batch_is_what_it_is():
    assert of(explored(), "micro_batch_rows").because.endswith(explored().evidence.probe.choice)


def test_an_exchange_that_dealt_the_global_batch_anew_says_so():
    profile = explored(adopted=True, micro_batch_rows=16)
    network = example_profile("d").evidence.network
    assert network is not None
    row: ExchangeRow = network.exchanges[0].model_copy(update={"rows": 16})
    network = network.model_copy(update={"exchanges": [row]})
    profile = profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"network": network})})
    assert "exchange of gradients deals the global batch" in of(profile, "micro_batch_rows").because
