"""Machines that run trials: their interface, and the base of those that are started.

``fork_server.ForkServerMachine`` runs trials on this node,
``multirank.MultirankMachine`` trials on several nodes. A
``contamination_guard.ContaminationGuard`` has another machine run its trials, and
watches the GPUs meanwhile.
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
"""Longest time that the server or the ranks may take to start; on a network file system
their imports take minutes."""
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
            environment_defaults: Environment variables of the processes, unless your
                own environment sets them.
        """
        self._environment_defaults = environment_defaults or {}
        self.versions: dict[str, Any] = {}
        """Versions of torch, CUDA and transformers, once the processes have started;
        its entry ``preloaded`` is the result of a ``Preload`` function, if there is
        one."""
        self.waited_s = 0.0
        """Seconds that this process has waited for the processes and their trials."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the processes; ``ENVIRONMENT`` has priority."""
        return {**self._environment_defaults, **os.environ, **ENVIRONMENT}

    def start(self) -> None:
        """Start the processes now.

        Raises:
            MachineLacks: If they cannot be started.
        """
        with self.waiting():
            self._ensure_started()

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, its failure or its time limit.

        Raises:
            MachineLacks: If the processes do not start, or the job cannot use the
                device.
            BadInput: If the job cannot use its input.
        """
        with self.waiting():
            return self._run(trial)

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes, and with them a trial that still runs."""

    @abc.abstractmethod
    def _ensure_started(self) -> object:
        """Start the processes unless they run."""

    @abc.abstractmethod
    def _run(self, trial: Trial) -> Outcome:
        """Run a trial, as ``run``; start the processes unless they run."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time of a ``with`` block to ``waited_s``."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - started_s
