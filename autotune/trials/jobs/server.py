"""The fork server: loads torch once, then forks the processes of each trial.

It speaks JSON lines (``autotune.trials.messages``): a request on standard input, a
reply on standard output. It runs no computation itself, so that no thread pool and no
CUDA context exists when it forks. When its standard input closes, it kills the trial
that runs, and ends.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from autotune.base.process import keep_orphans
from autotune.trials.jobs.preload import preload_model, preload_trainer
from autotune.trials.jobs.supervision import run_trial
from autotune.trials.messages import (
    ImportReply,
    ImportRequest,
    Preload,
    TrialReply,
    TrialRequest,
    encode,
    read_request,
)


def serve(preload: Preload | None) -> None:
    """Answer requests until standard input closes.

    The first reply has the versions of libraries.

    Args:
        preload: Function to call instead of loading what the trainer's trials need.
    """
    # Replies go to standard output; output of libraries goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(reply: object) -> None:
        replies.write(encode(reply) + "\n")
        replies.flush()

    keep_orphans()
    send(_load(preload))
    # Unbuffered, so that its end is seen in a trial.
    with open(0, "rb", buffering=0) as requests:
        for line in iter(requests.readline, b""):
            send(_answer(read_request(line)))


def _answer(request: TrialRequest | ImportRequest) -> TrialReply | ImportReply:
    if isinstance(request, ImportRequest):
        return ImportReply(threads=_import_modules(request.modules))
    preload_model(request.model_type)
    return run_trial(request, _input_closed)


def _input_closed(within_s: float) -> bool:
    """Return whether the parent closes standard input within some seconds."""
    # The parent sends nothing during a trial, so readable input is its end.
    readable, _, _ = select.select([0], [], [], within_s)
    return bool(readable)


def _load(preload: Preload | None) -> dict[str, Any]:
    """Import everything that trials need; return the versions of libraries."""
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if preload is None:
        preload_trainer()
        versions["transformers"] = importlib.metadata.version("transformers")
    else:
        module = importlib.import_module(preload.module)
        function = getattr(module, preload.function)
        versions["preloaded"] = function(**preload.options)
    return versions


def _import_modules(modules: Sequence[str]) -> int:
    """Import modules, and return the number of threads that this started.

    Modules that cannot be imported are left out.
    """
    threads_before = psutil.Process().num_threads()
    for module in modules:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(module)
    return psutil.Process().num_threads() - threads_before


def main() -> None:
    """Serve, with the ``Preload`` of the command line if it has one."""
    # Imported for children, which must not import anything near their memory limit.
    psutil.Process()
    preload = None
    if len(sys.argv) > 1:
        preload = Preload(**json.loads(sys.argv[1]))
    try:
        serve(preload)
    except SystemExit as end:
        # The parent closed the input during a trial, which was killed.
        if end.code != 0:
            raise
    # Nothing is left to do, and taking torch apart would delay the parent by most of a
    # second.
    os._exit(0)


if __name__ == "__main__":
    main()
