"""The fork server: loads torch once, then forks the processes of each trial.

It speaks JSON lines (``autotune.trials.messages``): a request on standard input, a
reply on standard output. It runs no computation itself, so that no thread pool and no
CUDA context exists when it forks. When the parent closes the server's standard input,
the server kills the trial that runs, and ends.
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
from autotune.trials.jobs.supervision import ParentGone, run_trial
from autotune.trials.messages import (
    ImportReply,
    ImportRequest,
    Preload,
    Reply,
    Request,
    encode,
    read_request,
)


def serve(preload: Preload | None) -> None:
    """Answer requests until standard input closes.

    The first reply, which answers no request, has the versions of libraries.

    Args:
        preload: Function to call instead of loading what the trainer's trials need.

    Raises:
        ParentGone: If standard input closes during a trial, which is killed.
    """
    # Replies go to the present standard output. What libraries print goes to standard
    # error, which is the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(reply: object) -> None:
        replies.write(encode(reply) + "\n")
        replies.flush()

    keep_orphans()
    send(_load(preload))
    # Unbuffered, so that ``_parent_gone`` sees the end of standard input.
    with open(0, "rb", buffering=0) as requests:
        for line in iter(requests.readline, b""):
            send(_answer(read_request(line)))


def _answer(request: Request) -> Reply:
    """Do what a request asks for, and return the reply."""
    if isinstance(request, ImportRequest):
        return ImportReply(threads=_import_modules(request.modules))
    preload_model(request.model_type)
    return run_trial(request, _parent_gone)


def _parent_gone(within_s: float) -> bool:
    """Return whether the parent closes standard input within ``within_s``."""
    # The parent sends nothing during a trial, so input that can be read is its end.
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
    preload = None
    if len(sys.argv) > 1:
        preload = Preload(**json.loads(sys.argv[1]))
    with contextlib.suppress(ParentGone):
        serve(preload)
    # At once: the parent waits, and taking torch apart takes most of a second.
    os._exit(0)


if __name__ == "__main__":
    main()
