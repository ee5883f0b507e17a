"""The fork server: loads torch and transformers once, then forks the processes of one trial after the other.

Speaks JSON lines: a request on standard input, a reply on standard output. It runs no computation itself, so that no
thread pool and no CUDA context exists when it forks. When its standard input closes, it kills what runs and ends.
"""

import functools
import importlib
import json
import os
import select
import sys
from typing import Any

import psutil
import torch
import transformers

from autotune.measure.jobs.processes import run_trial

_MODULES = ("trainer.loop", "autotune.measure.jobs.step", "autotune.measure.jobs.feed", "torch._dynamo")


def preload_trainer() -> None:
    """Import the trainer, the jobs that use it, and what torch would import in the first step."""
    for module in _MODULES:
        importlib.import_module(module)


@functools.cache
def preload_model(model_type: str | None) -> None:
    """Import a model type's code, by building its default shape without memory; of none, nothing."""
    if model_type is None:
        return
    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(model_type)
            transformers.AutoModelForMaskedLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - only a head start is lost: some types have no default shape
        sys.stderr.write(f"no head start for {model_type}: {error}\n")


def serve() -> None:
    """Answer requests until standard input closes."""
    # Replies go to the real standard output; whatever a library prints goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    def ended(within_s: float) -> bool:
        return bool(select.select([0], [], [], within_s)[0])  # nothing is asked meanwhile: this is the end

    preload_trainer()
    send({"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__})
    with open(0, "rb", buffering=0) as requests:  # unbuffered, so that its end is seen in a trial
        for line in iter(requests.readline, b""):
            request = json.loads(line)
            preload_model(request["measured"].get("config", {}).get("model", {}).get("config", {}).get("model_type"))
            send(run_trial(request, ended))


if __name__ == "__main__":
    psutil.Process()  # imported for children, which must not import anything near their memory limit
    serve()
    # Nothing is left to do, and taking torch apart would keep whoever closes this waiting for most of a second.
    os._exit(0)
