"""Hugging Face ``Trainer`` as a subject: ``--subject transformers``."""

from typing import ClassVar

from autotune.subjects.own.subject import Adapter, FunctionSubject
from autotune.subjects.subject import Setting


class TransformersSubject(FunctionSubject):
    """A function of yours that returns a ``Trainer``, such as ``make_trainer``.

    It must make its ``TrainingArguments`` itself, so that settings can be varied.
    """

    kind: ClassVar[str] = "transformers"
    adapter: ClassVar[Adapter] = Adapter(
        step_function="autotune.subjects.transformers.jobs:build_step",
        loader_function="autotune.subjects.transformers.jobs:build_loader",
        untuned_function="autotune.subjects.transformers.jobs:untuned_settings",
        training_function="autotune.subjects.transformers.jobs:build_training",
        settings=(
            Setting(name="bf16", values=(False, True), changes_rounding=True),
            Setting(name="torch_compile", values=(False, True)),
            Setting(name="gradient_checkpointing", values=(False, True)),
        ),
        names={
            "micro_batch_size": "per_device_train_batch_size",
            "num_workers": "dataloader_num_workers",
            "prefetch_factor": "dataloader_prefetch_factor",
            "pin_memory": "dataloader_pin_memory",
        },
    )
