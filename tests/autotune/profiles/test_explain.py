import pytest

from autotune.errors import BadInput
from autotune.profiles.decide.explain import (
    explanations,
    meaning_of,
    select_explanations,
)
from autotune.profiles.values import Evidence
from autotune.workers.values import JointChoice
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as tuned_profile
from trainer.config.train_config import DataSettings, ParallelSettings, TrainConfig


def _of(profile, key):
    (found,) = select_explanations(explanations(profile), key)
    return found


def _asked(key, evidence=None, **train):
    """The explanation of a setting of the example with other settings and evidence."""
    return _of(but(example_profile(), train=train, evidence=evidence or {}), key)


def test_every_setting_is_explained_once_and_the_models_config_is_one():
    keys = [one.key for one in explanations(example_profile())]
    assert len(keys) == len(set(keys))
    assert "model.config" in keys
    assert set(TrainConfig.model_fields) == {key.partition(".")[0] for key in keys}
    bare = example_profile().model_copy(update={"evidence": Evidence()})
    assert not [one for one in explanations(bare) if one.origin == "measured"]


def test_what_was_measured_has_its_figures_and_what_was_rejected():
    rows, workers = _asked("micro_batch_size"), _asked("data.num_workers")
    assert (rows.origin, rows.because, workers.origin) == (
        "measured",
        "because",
        "measured",
    )
    assert (rows.evidence[0].value, rows.evidence[0].n) == (900.0, 4)
    assert rows.rejected == ("1: 55.6% of the rate at 2", "3: out of memory")
    assert (
        workers.evidence[0].low,
        workers.evidence[0].high,
        workers.evidence[0].n,
    ) == (0.985, 0.995, 3)
    assert workers.rejected == (
        "0 workers: 50.0% of the rate with cached batches, too few",
        "0 is slow",
    )


def test_what_a_joint_search_found_has_its_proof():
    joint = JointChoice(
        trials=5,
        num_workers=1,
        prefetch_factor=2,
        pin_memory=False,
        ratio_to_workers_alone=1.2,
        ratio_low=1.1,
        ratio_high=1.3,
        adopted=True,
    )
    evidence = {
        "workers": (
            example_profile().evidence.workers.model_copy(update={"joint": joint})
        )
    }
    found = _asked("data.prefetch_factor", evidence)
    assert (found.origin, found.evidence[-1].low, found.evidence[-1].n) == (
        "measured",
        1.1,
        5,
    )
    assert found.because.startswith("found to be faster by a joint search over workers")
    assert _asked("data.pin_memory", evidence).origin == "changed"


@pytest.mark.parametrize(
    ("train", "key", "origin", "words"),
    [
        ({"micro_batch_size": 1}, "micro_batch_size", "changed", "2 was measured"),
        (
            {"data": DataSettings(num_workers=0)},
            "data.num_workers",
            "changed",
            "1 was measured",
        ),
        (
            {"global_batch_size": 99},
            "global_batch_size",
            "changed",
            "122 sequences would hold",
        ),
        ({"max_steps": 7}, "max_steps", "changed", "the default is 1000"),
        ({"global_batch_size": 122}, "global_batch_size", "constraint", ""),
        ({"attention_dropout": 0.0}, "attention_dropout", "requested", ""),
        ({}, "max_steps", "default", ""),
        ({}, "precision", "default", "all figures were measured with it"),
    ],
)
def test_what_no_figure_supports_was_changed_asked_for_or_is_a_default(
    train, key, origin, words
):
    found = _asked(key, **train)
    assert found.origin == origin
    assert words in found.because


def test_the_exchange_is_explained_by_the_ways_that_were_tried():
    profile = tuned_profile("d")
    found = _of(profile, "parallel.gradient_dtype")
    assert (found.origin, found.because) == (
        "measured",
        profile.evidence.network.choice,
    )
    default = (
        "ddp, fp32, 25 MiB buckets, 4 accumulation steps: 560,000 non-padding tokens/s,"
        " the default"
    )
    assert found.rejected == (default,)
    profile = but(profile, train={"parallel": ParallelSettings(bucket_cap_mib=7)})
    assert _of(profile, "parallel.bucket_cap_mib").origin == "changed"


def test_a_group_and_the_prefix_of_the_table_are_keys_too_an_unknown_one_suggests_the_nearest_and_each_has_a_meaning():
    assert (
        meaning_of("data.num_workers")
        == "DataLoader workers per GPU; 0 loads data in the training process."
    )
    assert meaning_of("model.config.rope.theta") is None
    found = explanations(example_profile())
    assert (
        select_explanations(found, "train.max_steps")[0].meaning
        == "Optimizer steps of the run."
    )
    assert {
        one.key.partition(".")[0] for one in select_explanations(found, "data")
    } == {"data"}
    for key in ("data.loader_workrs", "num_workers"):
        with pytest.raises(BadInput) as refused:
            select_explanations(found, key)
        assert "data.num_workers" in refused.value.next_step
    meanings = [one.meaning for one in found if one.meaning]
    assert len(meanings) > 50
    assert "\n" not in "".join(meanings)


def explored(*, adopted=False, **train):
    """The example, in which compiled layers were tried, and taken where that is
    said."""
    profile = tuned_profile("d")
    found = profile.evidence.explore
    if adopted:
        chosen = found.candidate.model_copy(update={"micro_batch_size": 32})
        rows = [row for row in found.rows if row.settings != found.candidate]
        rows.append(
            rows[0].model_copy(update={"settings": chosen, "ratio_to_starting": 1.3})
        )
        found = found.model_copy(
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
        train = {"compile": True, "micro_batch_size": 32} | train
    return but(profile, train=train, evidence={"explore": found, "network": None})


def test_what_was_taken_has_its_proof():
    found = _of(explored(adopted=True), "compile")
    assert (found.value, found.origin) == (True, "measured")
    assert found.because == "joint search of the step's settings: verified to be faster"
    (proof,) = found.evidence
    assert (proof.value, proof.low, proof.high, proof.confidence) == (
        1.3,
        1.2,
        1.4,
        0.98,
    )
    assert proof.known == "measured"
    names = [
        figure.name
        for figure in _of(explored(adopted=True), "micro_batch_size").evidence
    ]
    assert "largest that fits" in names
    assert (
        names[0]
        == "32 packed sequences, bf16, compiled, relative to the starting configuration"
    )


@pytest.mark.parametrize(
    ("key", "value", "ratio", "by"),
    [
        (
            "activation_checkpointing",
            "none",
            "full: at best 0.720",
            "64 packed sequences, bf16, full checkpointing",
        ),
        ("layout", "packed", "bucketed: at best 0.910", "64 bucketed sequences, bf16"),
    ],
)
def test_what_stayed_after_a_search_was_measured_and_is_no_mere_default(
    key, value, ratio, by
):
    found = _of(explored(), key)
    assert (found.value, found.origin) == (value, "measured")
    assert "was not verified to be faster" in found.because
    assert found.rejected == (f"{ratio} times the starting configuration, with {by}",)


@pytest.mark.parametrize(
    ("key", "left", "changed"),
    [("micro_batch_size", "64", 8), ("compile", "false", False)],
)
def test_the_value_that_was_left_is_named_as_the_unexplored_one_and_a_later_change_is_said(
    key, left, changed
):
    found = _of(explored(adopted=True), key)
    assert found.origin == "measured"
    words = "no configuration with it was faster than the starting one, which has it"
    assert found.rejected[0] == f"{left}: {words}"
    found = _of(explored(adopted=True, **{key: changed}), key)
    assert found.origin == "changed"
    assert "was chosen; joint search" in found.because


def test_what_was_not_explored_not_taken_or_did_not_run_is_explained_as_such():
    assert _of(explored(), "precision").origin == "requested"
    assert _of(explored(), "micro_batch_size").because.endswith(
        explored().evidence.probe.choice
    )
    assert _of(tuned_profile("d"), "attention").rejected == ("sdpa: crashed",)
    # An exchange that dealt the global batch again says so.
    profile, network = (
        explored(adopted=True, micro_batch_size=16),
        tuned_profile("d").evidence.network,
    )
    row = network.gradient_syncs[0].model_copy(update={"micro_batch_size": 16})
    network = network.model_copy(update={"gradient_syncs": [row]})
    profile = but(profile, evidence={"network": network})
    assert "split of the global batch by" in _of(profile, "micro_batch_size").because
