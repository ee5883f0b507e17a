"""Machines that run trials: their interface, and the base of those that are started.

``fork_server.ForkServerMachine`` runs trials on this node, ``multirank`` those of
several nodes; ``contamination_guard`` watches the GPUs of another machine.
"""

import abc
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

from autotune.trials.outcomes import Outcome
from autotune.trials.values import Trial

START_TIMEOUT_S = 300.0
"""Longest start of the server, or of the ranks; on a network file system imports take
minutes."""
ENVIRONMENT = {
    # Models are built from scratch, without network access.
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Libraries look for a GPU at import; through the CUDA runtime this would break CUDA
    # in all forked processes.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables of every process that runs trials."""


class Machine(Protocol):
    """Machine that runs one trial at a time, each in its own processes."""

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, its failure or its time limit."""

    def close(self) -> None:
        """End all processes that still run."""


class StartedMachine(abc.ABC):
    """Machine whose processes are started once, which takes some seconds.

    They start with ``start``, or else with the first trial.
    """

    def __init__(self, environment_defaults: Mapping[str, str] | None = None) -> None:
        """Prepare the machine.

        Args:
            environment_defaults: Environment variables of the processes, if you have
                not set them.
        """
        self._environment_defaults = environment_defaults or {}
        self.versions: dict[str, Any] = {}
        """Versions of torch, CUDA and transformers, once the processes have started;
        ``preloaded``, if anything."""
        self.waited_s = 0.0
        """Time that this process has waited for the processes and their trials."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the processes."""
        return {**self._environment_defaults, **os.environ, **ENVIRONMENT}

    def start(self) -> None:
        """Start the processes now.

        Raises:
            MachineLacks: If they cannot be started.
        """
        with self._waiting():
            self._ensure_started()

    def run(self, trial: Trial) -> Outcome:
        """Run a trial.

        Raises:
            MachineLacks: If its processes do not start.
            BadInput: If its input is unusable.
        """
        with self._waiting():
            return self._run(trial)

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes, and with them a trial that still runs."""

    @abc.abstractmethod
    def _ensure_started(self) -> object:
        """Start the processes unless they run."""

    @abc.abstractmethod
    def _run(self, trial: Trial) -> Outcome: ...

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block as waited."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started_s
