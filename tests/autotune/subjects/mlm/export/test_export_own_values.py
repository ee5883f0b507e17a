"""Exports of values that were tuned for your own training code."""

import pytest

from autotune.subjects.mlm.export.translate import export_own_values

OWN_VALUES = {"micro_batch_size": 48, "num_workers": 3, "images": 7}
"""Tuned values, of which no trainer knows ``images``: your ``build_step`` takes it."""


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


@pytest.mark.parametrize(
    ("to", "argument"),
    [
        ("hf-trainer", "gradient_accumulation_steps"),
        ("lightning", "accumulate_grad_batches"),
    ],
)
def test_own_accumulation_is_an_argument(to, argument):
    arguments, _ = export_own_values(to, {"gradient_accumulation_steps": 2})
    assert arguments == {argument: 2}


def test_accelerate_takes_own_accumulation_in_code():
    _, calls = export_own_values("accelerate", {"gradient_accumulation_steps": 2})
    assert calls == ("Accelerator(gradient_accumulation_steps=2)",)
