"""A loop with ``Accelerator`` as a subject: ``--subject accelerate``."""

from typing import ClassVar

from autotune.subjects.own.subject import Adapter, FunctionSubject
from autotune.subjects.subject import Setting


class AccelerateSubject(FunctionSubject):
    """A function of yours that returns the parts of a loop.

    They are ``(accelerator, model, optimizer, dataset, collate)``. It must make its
    ``Accelerator`` itself, so that settings can be varied.
    """

    kind: ClassVar[str] = "accelerate"
    adapter: ClassVar[Adapter] = Adapter(
        step_function="autotune.subjects.accelerate.jobs:build_step",
        loader_function="autotune.subjects.accelerate.jobs:build_loader",
        settings=(
            Setting(
                name="mixed_precision", values=("no", "bf16"), changes_rounding=True
            ),
        ),
        names={"micro_batch_size": "batch_size"},
    )
