import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export import batch, export_own_values, export_profile
from autotune.profiles.decide.export.batch import StepTime, exported_batch
from testbed.examples.profiles import but, example_profile
from trainer.config import train_config

MODERNBERT = train_config.ModelSettings(name="m", config={"model_type": "modernbert"})
SHARDED = train_config.ParallelSettings(strategy="fsdp2", shard_ranks=2)
FSDP = {"parallel": SHARDED, "precision": "bf16", "device": "cuda"}
TARGETS = ("hf-trainer", "accelerate", "lightning")
UNMEASURED = {"probe": None, "workers": None}


def _hold(non_padding_tokens, samples):
    return SequenceMeans(
        non_padding_tokens=non_padding_tokens, samples=samples, source="told"
    )


def _export(hold=None, ranks=1, evidence=None, to="hf-trainer", **changes):
    profile = but(example_profile(), train=changes, evidence=evidence or {})
    return export_profile(
        profile, hold or _hold(500.0, 2.0), to, nodes=1, ranks_per_node=ranks
    )


def _told(export, setting):
    return next(one for one in export.settings if one.setting == setting)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "packed"},
        {"layout": "bucketed", "activation_checkpointing": "selective"},
        FSDP,
        {
            "parallel": train_config.ParallelSettings(
                strategy="zero1", gradient_dtype="bf16"
            )
        },
    ],
)
def test_every_setting_is_told_once_and_what_differs_says_how(changes, to):
    export = _export(ranks=2, to=to, **changes)
    told = [one.setting for one in export.settings]
    assert len(told) == len(set(told))
    for key in train_config.dotted(example_profile().train.model_dump(mode="json")):
        assert key in told or key.partition(".")[0] in told, key
    written = [one.argument for one in export.settings if one.argument is not None]
    assert len(written) == len(set(written))
    assert all(one.equivalence == "same" or one.remark for one in export.settings)


@pytest.mark.parametrize(
    "changes, setting, equivalence",
    [
        ({"layout": "packed"}, "layout", "none"),
        ({}, "mlm_head", "none"),
        ({"model": MODERNBERT}, "mlm_head", "near"),
        (
            {"parallel": train_config.ParallelSettings(strategy="zero1")},
            "parallel.strategy",
            "none",
        ),
        (
            {"parallel": train_config.ParallelSettings(gradient_dtype="bf16")},
            "parallel.gradient_dtype",
            "none",
        ),
        (
            FSDP,
            "parallel.gradient_dtype",
            "none",
        ),  # fp32 is meant, and bf16 imposes itself
        (FSDP, "parallel.shard_ranks", "none"),
        ({"max_epochs": 3}, "max_epochs", "none"),
        ({"attention": "varlen"}, "attention", "none"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing", "same"),
    ],
)
def test_what_the_other_trainer_cannot_say_is_told(changes, setting, equivalence):
    assert _told(_export(**changes), setting).equivalence == equivalence


@pytest.mark.parametrize(
    "changes, argument, value",
    [
        (
            {"data": train_config.DataSettings(num_workers=0)},
            "dataloader_prefetch_factor",
            None,
        ),
        (
            {"data": train_config.DataSettings(num_workers=3)},
            "dataloader_prefetch_factor",
            2,
        ),
        ({}, "eval_steps", None),
        (
            {"evaluation": train_config.EvaluationSettings(interval_steps=50)},
            "eval_steps",
            50,
        ),
        ({}, "ddp_bucket_cap_mb", None),  # torch's own size stays unnamed
        (
            {"parallel": train_config.ParallelSettings(bucket_cap_mib=100)},
            "ddp_bucket_cap_mb",
            100,
        ),
        (
            {"checkpoint": train_config.CheckpointSettings(enabled=False)},
            "save_strategy",
            "no",
        ),
        ({"evidence": UNMEASURED}, "save_steps", None),
        (
            {
                "evidence": UNMEASURED,
                "checkpoint": train_config.CheckpointSettings(interval_steps=70),
            },
            "save_steps",
            70,
        ),
    ],
)
def test_arguments_are_written_only_if_they_say_something(changes, argument, value):
    assert _export(**changes).arguments.get(argument) == value


def test_the_call_says_what_is_no_argument_and_a_save_interval_in_seconds_becomes_steps_by_the_measured_rate():
    assert "sparse_prediction=True" in _export(model=MODERNBERT).calls[0]
    assert "attention_probs_dropout_prob=0.1" in _export(attention_dropout=0.1).calls[0]
    export = _export(
        checkpoint=train_config.CheckpointSettings(interval_s=60.0),
        global_batch_size=100,
    )
    # The sweep's 100 slots/s, 33.5 of 512 of them real.
    step_s = export.batch.tokens_per_step / (100 * 33.5 / 512)
    assert export.arguments["save_steps"] == max(1, int(60 / step_s))
    assert _told(export, "checkpoint.interval_s").remark.startswith("steps of")


@pytest.mark.parametrize(
    "to, arguments, calls",
    [
        (
            "hf-trainer",
            {"per_device_train_batch_size": 48, "dataloader_num_workers": 3},
            ("build_step(images=7)",),
        ),
        (
            "lightning",
            {},
            (
                "DataLoader(dataset, batch_size=48, num_workers=3)",
                "build_step(images=7)",
            ),
        ),
        (
            "accelerate",
            {},
            (
                "DataLoader(dataset, batch_size=48, num_workers=3)",
                "build_step(images=7)",
            ),
        ),
    ],
)
def test_values_of_own_code_become_arguments_or_code(to, arguments, calls):
    assert export_own_values(
        to, {"micro_batch_size": 48, "num_workers": 3, "images": 7}
    ) == (
        arguments,
        calls,
    )
    written, code = export_own_values(to, {"gradient_accumulation_steps": 2})
    assert [*written.values()] == [2] or code == (
        "Accelerator(gradient_accumulation_steps=2)",
    )


@pytest.mark.parametrize("step_s", [0.0, 5e-324])
def test_a_rate_that_no_machine_has_is_exported_all_the_same(monkeypatch, step_s):
    step_time = StepTime(step_s=step_s, source="edited")
    monkeypatch.setattr(batch, "_step_time", lambda *_: step_time)
    assert _export().arguments["save_steps"] > 10**9


def test_packed_rows_become_as_many_samples_as_hold_the_same_tokens():
    export = _export(
        _hold(510.0, 2.5), 2, layout="packed", micro_batch_size=8, global_batch_size=32
    )
    batch = export.batch
    assert (batch.per_device_batch_size, batch.gradient_accumulation_steps) == (8, 5)
    assert (batch.exported_samples_per_step, batch.tokens_per_step) == (80, 32 * 510)
    assert batch.exported_tokens_per_step == 80 * 510 / 2.5
    assert any(
        "packed sequences are not" in warning and "holds 2.50 on" in warning
        for warning in export.warnings
    )


def test_a_batch_in_tokens_or_samples_decides_and_without_a_dataset_a_packed_row_counts_as_one_sample():
    for said, rows in (
        ({"global_batch_tokens": 10_000}, 20),
        ({"global_batch_samples": 30}, 15),
    ):
        assert (
            _export(
                layout="packed", global_batch_size=1, **said
            ).batch.sequences_per_step
            == rows
        )
    export = _export(
        _hold(500.0, None), layout="packed", micro_batch_size=4, global_batch_size=16
    )
    assert (
        export.batch.exported_samples_per_step,
        export.batch.gradient_accumulation_steps,
    ) == (16, 4)
    assert export.batch.exported_tokens_per_step is None  # no figure is made up
    assert any("--data" in warning for warning in export.warnings)


@given(
    rows=st.integers(1, 5000),
    micro=st.integers(1, 300),
    ranks=st.integers(1, 64),
    samples=st.floats(1.0, 30.0),
)
def test_no_micro_batch_is_larger_than_what_fits_and_the_step_is_as_near_as_whole_ones_allow(
    rows, micro, ranks, samples
):
    profile = but(
        example_profile(),
        train={
            "layout": "packed",
            "micro_batch_size": micro,
            "global_batch_size": rows,
        },
    )
    batch = exported_batch(profile, _hold(100.0, samples), ranks)
    each, steps = batch.per_device_batch_size, batch.gradient_accumulation_steps
    assert 1 <= each <= micro
    assert batch.exported_samples_per_step == each * steps * ranks
    meant = max(1, round(rows * samples))
    assert abs(batch.exported_samples_per_step - meant) <= max(
        steps * ranks / 2, steps * ranks - meant
    )
