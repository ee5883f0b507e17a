"""Imports that the fork server does once, so that trials need not."""

import functools
import importlib
import sys

import torch

from trainer.runtime.garbage_collection import collection_paused


def preload_trainer() -> None:
    """Import the trainer, its jobs, and modules that torch imports in a first step."""
    # Transformers imports torchao if it is installed. That starts CUDA, which then
    # works in no forked process. None makes its import fail.
    sys.modules["torchao"] = None  # type: ignore[assignment]
    with collection_paused():
        for module in (
            "trainer.loop",
            "autotune.memory.jobs.step",
            "autotune.subjects.mlm.jobs.step",
            "autotune.subjects.mlm.jobs.loader",
            "autotune.subjects.mlm.jobs.window_step",
            "autotune.workers.jobs.window",
            "torch._dynamo",
        ):
            importlib.import_module(module)
    del sys.modules["torchao"]


@functools.cache
def preload_model(model_type: str | None) -> None:
    """Import the code of a model type.

    Args:
        model_type: Type in transformers; None does nothing.
    """
    if model_type is None:
        return
    # Imported here, as servers of your code may have no need of it.
    import transformers

    try:
        # Building a model of the default shape, without memory for its weights, imports
        # all of its code.
        with collection_paused(), torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")
