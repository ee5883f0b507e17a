import pytest

from autotune.errors import BadInput
from autotune.evidence.profile import Evidence
from autotune.evidence.workers import JointChoice
from autotune.profiles.decide.explain import (
    explanations,
    meaning_of,
    select_explanations,
)
from testbed.examples.kernels import near_bounds, with_kernels
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as tuned_profile
from tests.autotune.profiles.explanations import explain
from trainer.formats.train_config import DataSettings, ParallelSettings, TrainConfig

ADOPTED_WITHOUT_PINNING = JointChoice(
    trials=5,
    num_workers=1,
    prefetch_factor=2,
    pin_memory=False,
    ratio_to_workers_alone=1.2,
    ratio_low=1.1,
    ratio_high=1.3,
    adopted=True,
)
"""Joint search that adopted the example's settings, but does not pin memory."""
PROBE = example_profile().evidence.probe
WORKERS = example_profile().evidence.workers
FOLLOWING_GLOBAL_BATCH_SIZE = 122
"""Sequences of the example's global batch: 4,096 tokens, 33.5 in each on average."""


def explain_example(key, evidence=None, **train):
    """Return the explanation of a setting of the example.

    Args:
        key: Key of the setting.
        evidence: Evidence that replaces the example's, by command.
        train: Settings that replace the example's.
    """
    return explain(but(example_profile(), train=train, evidence=evidence or {}), key)


def test_explains_every_setting_once():
    keys = [explanation.key for explanation in explanations(example_profile())]
    assert len(keys) == len(set(keys))
    # The model's config is one setting.
    assert "model.config" in keys
    assert set(TrainConfig.model_fields) == {key.partition(".")[0] for key in keys}


def test_nothing_is_measured_without_evidence():
    bare = example_profile().model_copy(update={"evidence": Evidence()})
    origins = {explanation.origin for explanation in explanations(bare)}
    assert origins == {"constraint", "default", "changed"}


def test_micro_batch_has_figures_of_the_probe():
    explanation = explain_example("micro_batch_size")
    assert explanation.origin == "measured"
    assert explanation.because == PROBE.choice
    # The rate of the chosen size 2, of 4 steps.
    assert explanation.evidence[0].value == 900.0
    assert explanation.evidence[0].n == 4
    assert explanation.rejected == (
        "1: 55.6% of the rate at 2",
        "3: out of memory",
    )


def test_micro_batch_of_a_confirmation_has_its_windows():
    profile = with_kernels(example_profile(), near_bounds())
    row = profile.evidence.confirm.rows[0].model_copy(update={"micro_batch_size": 1})
    confirm = profile.evidence.confirm.model_copy(update={"rows": [row]})
    explanation = explain_example(
        "micro_batch_size", {"confirm": confirm}, micro_batch_size=1
    )
    assert explanation.origin == "measured"
    assert explanation.because.startswith("surely faster than the probe's choice")
    assert explanation.evidence[0].n == 3
    assert explanation.evidence[0].value == pytest.approx(100.0, rel=1e-3)


def test_same_split_is_no_alternative():
    explanation = explain_example("micro_batch_size", global_batch_size=1)
    assert explanation.rejected[0] == "1: the same split, 1 = 1 x 1"


def test_workers_have_figures_of_the_sweep():
    explanation = explain_example("data.num_workers")
    assert explanation.origin == "measured"
    # The throughput with the chosen worker relative to cached batches, of 3 windows.
    assert explanation.evidence[0].low == 0.985
    assert explanation.evidence[0].high == 0.995
    assert explanation.evidence[0].n == 3
    assert explanation.rejected == (
        "0 workers: 50.0 % of the throughput on cached batches, too few",
        WORKERS.next_smaller,
    )


def test_joint_search_has_its_figures():
    workers = WORKERS.model_copy(update={"joint": ADOPTED_WITHOUT_PINNING})
    explanation = explain_example("data.prefetch_factor", {"workers": workers})
    assert explanation.origin == "measured"
    assert explanation.evidence[-1].low == 1.1
    assert explanation.evidence[-1].n == 5
    assert explanation.because.startswith(
        "found to be faster by a joint search over workers"
    )


def test_setting_changed_since_a_joint_search():
    workers = WORKERS.model_copy(update={"joint": ADOPTED_WITHOUT_PINNING})
    # The example pins memory, which is the default.
    explanation = explain_example("data.pin_memory", {"workers": workers})
    assert explanation.origin == "changed"


@pytest.mark.parametrize(
    ("train", "key", "reason"),
    [
        pytest.param(
            {"micro_batch_size": 1},
            "micro_batch_size",
            f"2 was measured to be the best choice: {PROBE.choice}",
            id="micro-batch size",
        ),
        pytest.param(
            {"data": DataSettings(num_workers=0)},
            "data.num_workers",
            f"1 was measured to be the best choice: {WORKERS.choice}",
            id="workers",
        ),
        pytest.param(
            {"global_batch_size": 99},
            "global_batch_size",
            f"{FOLLOWING_GLOBAL_BATCH_SIZE} sequences would hold 4,096 non-padding"
            " tokens, as you set",
            id="global batch",
        ),
        pytest.param(
            {"max_steps": 7},
            "max_steps",
            "set by hand or by autotune advise; the default is 1000, and no"
            " measurement decides it",
            id="not measured",
        ),
    ],
)
def test_edited_setting_is_changed(train, key, reason):
    explanation = explain_example(key, **train)
    assert explanation.origin == "changed"
    assert explanation.because == reason


def test_global_batch_of_your_tokens_is_a_constraint():
    explanation = explain_example(
        "global_batch_size", global_batch_size=FOLLOWING_GLOBAL_BATCH_SIZE
    )
    assert explanation.origin == "constraint"
    assert explanation.because == (
        f"{FOLLOWING_GLOBAL_BATCH_SIZE} sequences hold 4,096 non-padding tokens, as you"
        " set"
    )


def test_option_of_the_probe_is_requested():
    explanation = explain_example("attention_dropout", attention_dropout=0.0)
    assert explanation.origin == "requested"
    assert explanation.because == (
        "an option of the probe, or its default for this device; all figures hold only"
        " for it"
    )


def test_setting_without_measurement_is_a_default():
    explanation = explain_example("max_steps")
    assert explanation.origin == "default"
    assert explanation.because == "the trainer's default"


def test_default_that_figures_hold_for_says_so():
    explanation = explain_example("precision")
    assert explanation.origin == "default"
    assert explanation.because == (
        "the trainer's default; all figures were measured with it"
    )


def test_gradient_sync_has_measured_configurations():
    profile = tuned_profile(dataset_hash="d")
    explanation = explain(profile, "parallel.gradient_dtype")
    assert explanation.origin == "measured"
    assert explanation.because == profile.evidence.network.choice
    assert explanation.rejected == (
        (
            "ddp, fp32, 25 MiB buckets, 4 x 64 sequences: 560,000 non-padding"
            " tokens/s, the default"
        ),
    )


def test_unmeasured_gradient_sync_was_changed():
    parallel = ParallelSettings(bucket_cap_mib=7)
    profile = but(tuned_profile(dataset_hash="d"), train={"parallel": parallel})
    assert explain(profile, "parallel.bucket_cap_mib").origin == "changed"


def test_meaning_is_the_schemas():
    assert meaning_of("data.num_workers") == (
        "DataLoader workers per GPU; 0 loads data in the training process."
    )


def test_explanation_has_the_meaning_of_its_setting():
    explanation = explain(example_profile(), "max_steps")
    assert explanation.meaning == "Optimizer steps of the run."


def test_key_of_a_model_config_has_no_meaning():
    assert meaning_of("model.config.rope.theta") is None


def test_meanings_have_one_line():
    meanings = [
        explanation.meaning
        for explanation in explanations(example_profile())
        if explanation.meaning
    ]
    # A guard against an empty list: almost every setting has a meaning.
    assert len(meanings) > 50
    assert "\n" not in "".join(meanings)


def test_selects_a_key_with_its_table():
    (explanation,) = select_explanations(
        explanations(example_profile()), "train.max_steps"
    )
    assert explanation.key == "max_steps"


def test_selects_a_group():
    group = select_explanations(explanations(example_profile()), "data")
    tables = {explanation.key.partition(".")[0] for explanation in group}
    assert tables == {"data"}


@pytest.mark.parametrize("key", ["data.loader_workrs", "num_workers"])
def test_unknown_key_suggests_the_nearest(key):
    with pytest.raises(BadInput) as caught:
        select_explanations(explanations(example_profile()), key)
    assert "data.num_workers" in caught.value.next_step
