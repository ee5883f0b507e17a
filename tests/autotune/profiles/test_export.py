import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export import batch, export_own_values, export_profile
from autotune.profiles.decide.export.batch import exported_batch
from testbed.examples.profiles import but, example_profile
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    ParallelSettings,
    dotted,
)

MODERNBERT = ModelSettings(name="m", config={"model_type": "modernbert"})
FSDP = {
    "parallel": ParallelSettings(strategy="fsdp2", shard_ranks=2),
    "precision": "bf16",
    "device": "cuda",
}
TARGETS = ("hf-trainer", "accelerate", "lightning")
UNMEASURED = {"probe": None, "workers": None}
"""Evidence of a profile without a measured rate."""


def means_of(non_padding_tokens, samples):
    """Return tokens and samples of a sequence, on average."""
    return SequenceMeans(
        non_padding_tokens=non_padding_tokens, samples=samples, source="told"
    )


MEANS = means_of(non_padding_tokens=500.0, samples=2.0)


def export_example(to="hf-trainer", *, ranks=1, means=MEANS, evidence=None, **train):
    """Return an export of the example profile with other settings.

    Args:
        to: Target of the export.
        ranks: Ranks that train on one node.
        means: Tokens and samples of a sequence, on average.
        evidence: Evidence that replaces the example's, by command.
        train: Settings that replace the example's.
    """
    profile = but(example_profile(), train=train, evidence=evidence or {})
    return export_profile(profile, means, to, nodes=1, ranks_per_node=ranks)


def exported_setting(export, name):
    """Return the only row of an export on a setting."""
    (setting,) = (row for row in export.settings if row.setting == name)
    return setting


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="example"),
        pytest.param({"layout": "packed"}, id="packed"),
        pytest.param(
            {"layout": "bucketed", "activation_checkpointing": "selective"},
            id="bucketed",
        ),
        pytest.param(FSDP, id="FSDP"),
        pytest.param(
            {"parallel": ParallelSettings(strategy="zero1", gradient_dtype="bf16")},
            id="ZeRO",
        ),
    ],
)
def test_exports_every_setting_once(changes, to):
    export = export_example(ranks=2, to=to, **changes)
    names = [row.setting for row in export.settings]
    assert len(names) == len(set(names))
    for key in dotted(example_profile().train.model_dump(mode="json")):
        assert key in names or key.partition(".")[0] in names, key
    arguments = [row.argument for row in export.settings if row.argument is not None]
    assert len(arguments) == len(set(arguments))
    assert all(row.equivalence == "same" or row.remark for row in export.settings)


@pytest.mark.parametrize(
    ("changes", "setting", "equivalence"),
    [
        pytest.param({"layout": "packed"}, "layout", "none", id="packed"),
        pytest.param({}, "mlm_head", "none", id="sparse head"),
        pytest.param({"model": MODERNBERT}, "mlm_head", "near", id="sparse ModernBERT"),
        pytest.param(
            {"parallel": ParallelSettings(strategy="zero1")},
            "parallel.strategy",
            "none",
            id="ZeRO",
        ),
        pytest.param(
            {"parallel": ParallelSettings(gradient_dtype="bf16")},
            "parallel.gradient_dtype",
            "none",
            id="bf16 gradients",
        ),
        # The profile has fp32 gradients, but FSDP with bf16 sends bf16.
        pytest.param(
            FSDP, "parallel.gradient_dtype", "none", id="fp32 gradients of FSDP"
        ),
        pytest.param(FSDP, "parallel.shard_ranks", "none", id="HSDP"),
        pytest.param({"max_epochs": 3}, "max_epochs", "none", id="epochs"),
        pytest.param({"attention": "varlen"}, "attention", "none", id="varlen"),
        pytest.param(
            {"activation_checkpointing": "full"},
            "activation_checkpointing",
            "same",
            id="full checkpointing",
        ),
    ],
)
def test_equivalence_of_a_setting(changes, setting, equivalence):
    export = export_example(**changes)
    assert exported_setting(export, setting).equivalence == equivalence


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        pytest.param(
            {"data": DataSettings(num_workers=3)},
            "dataloader_prefetch_factor",
            2,
            id="workers prefetch",
        ),
        pytest.param(
            {"evaluation": EvaluationSettings(interval_steps=50)},
            "eval_steps",
            50,
            id="evaluation",
        ),
        pytest.param(
            {"parallel": ParallelSettings(bucket_cap_mib=100)},
            "ddp_bucket_cap_mb",
            100,
            id="bucket size",
        ),
        pytest.param(
            {"checkpoint": CheckpointSettings(enabled=False)},
            "save_strategy",
            "no",
            id="no checkpoints",
        ),
        pytest.param(
            {
                "evidence": UNMEASURED,
                "checkpoint": CheckpointSettings(interval_steps=70),
            },
            "save_steps",
            70,
            id="checkpoints without a measured rate",
        ),
    ],
)
def test_writes_arguments_of_settings_in_use(changes, argument, value):
    assert export_example(**changes).arguments[argument] == value


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        pytest.param(
            {"data": DataSettings(num_workers=0)},
            "dataloader_prefetch_factor",
            id="no workers prefetch",
        ),
        pytest.param({}, "eval_steps", id="no evaluation"),
        # Torch makes the first bucket smaller only if no size is given.
        pytest.param({}, "ddp_bucket_cap_mb", id="torch's bucket size"),
        pytest.param(
            {"evidence": UNMEASURED}, "save_steps", id="no rate to convert seconds"
        ),
    ],
)
def test_omits_arguments_without_effect(changes, argument):
    assert argument not in export_example(**changes).arguments


def test_model_call_has_the_sparse_head():
    export = export_example(model=MODERNBERT)
    assert "sparse_prediction=True" in export.calls[0]


def test_model_call_has_attention_dropout():
    export = export_example(attention_dropout=0.1)
    assert "attention_probs_dropout_prob=0.1" in export.calls[0]


def test_checkpoint_interval_becomes_steps():
    export = export_example(
        checkpoint=CheckpointSettings(interval_s=60.0),
        global_batch_size=100,
    )
    # The sweep measured 100 tokens/s including padding; 33.5 of 512 are non-padding.
    non_padding_tokens_per_s = 100 * 33.5 / 512
    step_s = export.batch.tokens_per_step / non_padding_tokens_per_s
    assert export.arguments["save_steps"] == max(1, int(60 / step_s))
    remark = exported_setting(export, "checkpoint.interval_s").remark
    assert remark.startswith("steps of")


OWN_VALUES = {"micro_batch_size": 48, "num_workers": 3, "images": 7}
"""Values tuned for somebody's training code, of which no trainer knows ``images``."""


def test_transformers_takes_own_values_as_arguments():
    assert export_own_values("hf-trainer", OWN_VALUES) == (
        {"per_device_train_batch_size": 48, "dataloader_num_workers": 3},
        ("build_step(images=7)",),
    )


@pytest.mark.parametrize("to", ["lightning", "accelerate"])
def test_loops_take_own_values_in_code(to):
    assert export_own_values(to, OWN_VALUES) == (
        {},
        (
            "DataLoader(dataset, batch_size=48, num_workers=3)",
            "build_step(images=7)",
        ),
    )


@pytest.mark.parametrize("to", ["hf-trainer", "lightning"])
def test_own_accumulation_is_an_argument(to):
    arguments, _ = export_own_values(to, {"gradient_accumulation_steps": 2})
    assert list(arguments.values()) == [2]


def test_accelerate_takes_own_accumulation_in_code():
    _, calls = export_own_values("accelerate", {"gradient_accumulation_steps": 2})
    assert calls == ("Accelerator(gradient_accumulation_steps=2)",)


@pytest.mark.parametrize("step_s", [0.0, 5e-324], ids=["zero", "least float"])
def test_impossible_rate_is_exported(monkeypatch, step_s):
    # A foreign profile may hold any rate; no step can be that short.
    step_time = batch.StepTime(step_s=step_s, source="edited")
    monkeypatch.setattr(batch, "_step_time", lambda *_: step_time)
    assert export_example().arguments["save_steps"] > 10**9


def test_packed_sequences_become_samples_of_the_same_tokens():
    export = export_example(
        means=means_of(non_padding_tokens=510.0, samples=2.5),
        ranks=2,
        layout="packed",
        micro_batch_size=8,
        global_batch_size=32,
    )
    # 32 sequences of 2.5 samples.
    assert export.batch.exported_samples_per_step == 80
    assert export.batch.per_device_batch_size == 8
    assert export.batch.gradient_accumulation_steps == 5
    assert export.batch.tokens_per_step == 32 * 510
    assert export.batch.exported_tokens_per_step == 80 * 510 / 2.5
    assert any(
        "packed sequences are not" in warning and "holds 2.50 on" in warning
        for warning in export.warnings
    )


@pytest.mark.parametrize(
    ("global_batch", "sequences"),
    [
        # Sequences of 500 tokens and 2 samples.
        pytest.param({"global_batch_tokens": 10_000}, 20, id="tokens"),
        pytest.param({"global_batch_samples": 30}, 15, id="samples"),
    ],
)
def test_global_batch_in_another_unit_decides(global_batch, sequences):
    export = export_example(layout="packed", global_batch_size=1, **global_batch)
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
    samples=st.floats(1.0, 30.0),
)
def test_exported_step_is_nearest_of_what_fits(
    sequences, micro_batch_size, ranks, samples
):
    profile = but(
        example_profile(),
        train={
            "layout": "packed",
            "micro_batch_size": micro_batch_size,
            "global_batch_size": sequences,
        },
    )
    exported = exported_batch(profile, means_of(100.0, samples), ranks)
    size = exported.per_device_batch_size
    micro_batches = exported.gradient_accumulation_steps * ranks
    assert 1 <= size <= micro_batch_size
    assert exported.exported_samples_per_step == size * micro_batches
    wanted_samples = max(1, round(sequences * samples))
    difference = abs(exported.exported_samples_per_step - wanted_samples)
    # Rounding the size is off by at most half a sample in each micro-batch; but each
    # micro-batch has at least one sample.
    assert difference <= max(micro_batches / 2, micro_batches - wanted_samples)
