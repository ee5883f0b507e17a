"""Settings of an export: the equivalent of each, and the arguments that it has."""

from typing import get_args

import pytest

from autotune.subjects.mlm.export.targets import TargetName
from tests.autotune.subjects.mlm.export.exports import export_example
from trainer.formats.train_config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    ParallelSettings,
)

TARGETS = get_args(TargetName)
MODERNBERT = ModelSettings(name="m", config={"model_type": "modernbert"})
FSDP = {
    "parallel": ParallelSettings(strategy="fsdp2", shard_ranks=2),
    "precision": "bf16",
    "device": "cuda",
}
"""Settings of a profile that shards over 2 ranks."""
UNMEASURED = {"probe": None, "workers": None}
"""Evidence of a profile without a measured rate."""
EXPORTED_CHANGES = [
    pytest.param({}, id="example"),
    pytest.param({"layout": "packed"}, id="packed"),
    pytest.param(
        {"layout": "bucketed", "activation_checkpointing": "selective"}, id="bucketed"
    ),
    pytest.param(FSDP, id="FSDP"),
    pytest.param(
        {"parallel": ParallelSettings(strategy="zero1", gradient_dtype="bf16")},
        id="ZeRO",
    ),
]
"""Changes of the example that are exported to all targets."""


def exported_setting(export, name):
    """Return the only row of an export on a setting."""
    (setting,) = (row for row in export.settings if row.setting == name)
    return setting


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("changes", EXPORTED_CHANGES)
def test_sets_every_argument_once(changes, to):
    export = export_example(ranks=2, to=to, **changes)
    arguments = [row.argument for row in export.settings if row.argument is not None]
    assert len(arguments) == len(set(arguments))


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("changes", EXPORTED_CHANGES)
def test_every_value_is_in_file_or_code(changes, to):
    export = export_example(ranks=2, to=to, **changes)
    code = "\n".join(export.calls)
    lost = []
    for row in export.settings:
        if row.value is None or row.argument in export.arguments:
            continue
        keyword = row.argument.removesuffix(")").partition("(")[2]
        if f"{keyword}={row.value!r}".removeprefix("=") not in code:
            lost.append(row)
    assert lost == []


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("changes", EXPORTED_CHANGES)
def test_remarks_on_every_difference(changes, to):
    export = export_example(ranks=2, to=to, **changes)
    differing = [row for row in export.settings if row.equivalence != "same"]
    assert differing
    assert all(row.remark for row in differing)


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
