"""Optimizer step of an export, and its interval between checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.subjects.mlm.export.batch import exported_batch
from testbed.examples.profiles import but, example_profile
from tests.autotune.subjects.mlm.export.exports import export_example, means_of
from trainer.formats.train_config import CheckpointSettings


def test_packed_sequences_become_samples_of_the_same_tokens():
    exported = export_example(
        means=means_of(non_padding_tokens=510.0, samples=2.5),
        ranks=2,
        layout="packed",
        micro_batch_size=8,
        global_batch_size=32,
    ).batch
    # 32 sequences of 2.5 samples are 80 samples: 5 micro-batches of 8 on each rank.
    assert exported.exported_samples_per_step == 80
    assert exported.per_device_batch_size == 8
    assert exported.gradient_accumulation_steps == 5
    assert exported.tokens_per_step == 32 * 510
    assert exported.exported_tokens_per_step == 80 * 510 / 2.5


def test_warns_of_samples_in_packed_sequences():
    export = export_example(
        means=means_of(non_padding_tokens=510.0, samples=2.5), layout="packed"
    )
    assert any(
        "packed sequences are not" in warning and "holds 2.50 on" in warning
        for warning in export.warnings
    )


@pytest.mark.parametrize(
    ("global_batch", "sequences"),
    [
        pytest.param({"global_batch_tokens": 10_000}, 20, id="tokens"),
        pytest.param({"global_batch_samples": 30}, 15, id="samples"),
    ],
)
def test_global_batch_in_another_unit_decides(global_batch, sequences):
    export = export_example(
        means=means_of(non_padding_tokens=500.0, samples=2.0),
        layout="packed",
        global_batch_size=1,
        **global_batch,
    )
    assert export.batch.sequences_per_step == sequences


def test_packed_sequence_of_unknown_samples_counts_as_one():
    export = export_example(
        means=means_of(non_padding_tokens=500.0, samples=None),
        layout="packed",
        micro_batch_size=4,
        global_batch_size=16,
    )
    assert export.batch.exported_samples_per_step == 16
    assert export.batch.gradient_accumulation_steps == 4
    # No figure is made up.
    assert export.batch.exported_tokens_per_step is None
    assert any("--data" in warning for warning in export.warnings)


@given(
    sequences=st.integers(1, 5000),
    micro_batch_size=st.integers(1, 300),
    ranks=st.integers(1, 64),
    samples_per_sequence=st.floats(1.0, 30.0),
)
def test_exported_step_is_nearest_of_what_fits(
    sequences, micro_batch_size, ranks, samples_per_sequence
):
    profile = but(
        example_profile(),
        train={
            "layout": "packed",
            "micro_batch_size": micro_batch_size,
            "global_batch_size": sequences,
        },
    )
    means = means_of(non_padding_tokens=100.0, samples=samples_per_sequence)
    exported = exported_batch(profile, means, ranks)
    size = exported.per_device_batch_size
    micro_batches = exported.gradient_accumulation_steps * ranks
    assert 1 <= size <= micro_batch_size
    assert exported.exported_samples_per_step == size * micro_batches
    wanted_samples = max(1, round(sequences * samples_per_sequence))
    difference = abs(exported.exported_samples_per_step - wanted_samples)
    # Rounding the size is off by at most half a sample in each micro-batch; but each
    # micro-batch has at least one sample.
    assert difference <= max(micro_batches / 2, micro_batches - wanted_samples)


@pytest.mark.parametrize(
    ("interval_steps", "steps"),
    [
        # The worker sweep measured 100 tokens/s including padding; of the 512 tokens of
        # a sequence, 33.5 are non-padding. So a step of 500 tokens takes 76.4 s, of
        # which 600 s have 7.
        pytest.param(None, 7, id="seconds only"),
        pytest.param(3, 3, id="fewer steps"),
        pytest.param(9, 7, id="more steps"),
    ],
)
def test_checkpoint_interval_becomes_steps(interval_steps, steps):
    checkpoint = CheckpointSettings(interval_s=600.0, interval_steps=interval_steps)
    export = export_example(
        means=means_of(non_padding_tokens=500.0, samples=2.0),
        global_batch_size=1,
        checkpoint=checkpoint,
    )
    assert export.arguments["save_steps"] == steps


def test_checkpoints_are_at_least_a_step_apart():
    # A step takes 100 times 76.4 s.
    export = export_example(
        means=means_of(non_padding_tokens=500.0, samples=2.0),
        global_batch_size=100,
        checkpoint=CheckpointSettings(interval_s=60.0),
    )
    assert export.arguments["save_steps"] == 1


def test_remark_has_the_step_time_of_checkpoints():
    export = export_example()
    (setting,) = (
        row for row in export.settings if row.setting == "checkpoint.interval_s"
    )
    assert setting.remark.startswith("steps of")


def workers_at(padded_tokens_per_s):
    """Return the example's worker sweep as if every window had this rate."""
    workers = example_profile().evidence.workers
    rows = [
        row.model_copy(update={"units_per_s": [padded_tokens_per_s] * 3})
        for row in workers.rows
    ]
    return workers.model_copy(update={"rows": rows})


@pytest.mark.parametrize(
    ("padded_tokens_per_s", "tokens_per_sequence"),
    [
        pytest.param(1e308, 500.0, id="impossible rate"),
        pytest.param(100.0, 0.0, id="no tokens"),
    ],
)
def test_step_without_time_is_exported(padded_tokens_per_s, tokens_per_sequence):
    export = export_example(
        means=means_of(non_padding_tokens=tokens_per_sequence, samples=2.0),
        # A foreign profile may hold any rate.
        evidence={"workers": workers_at(padded_tokens_per_s)},
    )
    # The default interval of 600 s has at most a step each nanosecond.
    assert export.arguments["save_steps"] == pytest.approx(600 / 1e-9)
