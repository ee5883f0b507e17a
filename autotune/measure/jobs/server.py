"""The fork server: loads torch and transformers once, then forks the processes of one trial after the other.

Speaks JSON lines: a request on standard input, a reply on standard output. It runs no computation itself, so that no
thread pool and no CUDA context exists when it forks. When its standard input closes, it kills what runs and ends.
"""

import json
import os
import select
from typing import Any

import psutil
import torch
import transformers

from autotune.measure.jobs.preload import model_type_of, preload_model, preload_trainer
from autotune.measure.jobs.processes import run_trial


class Requests:
    """Standard input, read unbuffered, so that its end is seen while a trial runs."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def next(self) -> dict[str, Any] | None:
        """The next request; None at the end."""
        while b"\n" not in self._buffer:
            if not self._read():
                return None
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        request: dict[str, Any] = json.loads(line)
        return request

    def ended(self, within_s: float) -> bool:
        """Wait for so long, and say whether there is nobody left who could ask."""
        readable, _, _ = select.select([0], [], [], within_s)
        return bool(readable) and not self._read()

    def _read(self) -> bool:
        chunk = os.read(0, 65536)
        self._buffer.extend(chunk)
        return bool(chunk)


def serve() -> None:
    """Answer requests until standard input closes."""
    # Replies go to the real standard output; whatever a library prints goes to the log.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    preload_trainer()
    _send(replies, {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__})
    requests = Requests()
    preloaded: set[str | None] = set()
    while (request := requests.next()) is not None:
        model_type = model_type_of(request["measured"])
        if model_type not in preloaded:
            preload_model(model_type)
            preloaded.add(model_type)
        _send(replies, run_trial(request, requests.ended))


def _send(replies: Any, value: dict[str, Any]) -> None:  # noqa: ANN401 - a text stream
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    psutil.Process()  # imported for children, which must not import anything near their memory limit
    serve()
    # Nothing is left to do, and taking torch apart would keep whoever closes this waiting for most of a second.
    os._exit(0)
