"""A ``LightningModule`` and its data as a subject: ``--subject lightning``."""

from typing import ClassVar

from autotune.subjects.own.subject import Adapter, FunctionSubject
from autotune.subjects.subject import Setting


class LightningSubject(FunctionSubject):
    """A function of yours that returns a module and its data.

    It returns ``module``, ``(module, datamodule)``, or ``(module, datamodule,
    options)`` with options of Lightning's ``Trainer``.
    """

    kind: ClassVar[str] = "lightning"
    adapter: ClassVar[Adapter] = Adapter(
        step_function="autotune.subjects.lightning.jobs:build_step",
        loader_function="autotune.subjects.lightning.jobs:build_loader",
        untuned_function="autotune.subjects.lightning.jobs:untuned_settings",
        training_function="autotune.subjects.lightning.jobs:build_training",
        settings=(
            Setting(
                name="precision",
                values=("32-true", "bf16-mixed"),
                changes_rounding=True,
            ),
        ),
        names={"micro_batch_size": "batch_size"},
    )
