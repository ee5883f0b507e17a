"""Limits of DataLoader workers per rank: CPUs, memory and shared memory. Pure.

They are checked before any worker is started.
"""

import bisect
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.base.wording import plural
from autotune.errors import ExceedsMemory
from autotune.machine.values import HostFacts

WORKER_BYTES = 96 * 2**20
"""Private memory of a forked worker, assumed until one is measured. Short windows
showed 9 to 11 MiB (Python 3.11, torch 2.13, 8 sequences of 128 tokens), but over hours
reference counts copy more of the shared pages."""
USABLE_SHARE = 0.9
"""Share of free memory that workers may use; the rest is for growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """Limits of the DataLoader workers of a rank."""

    host: HostFacts
    """CPUs and memory of the machine."""
    local_ranks: int
    """Ranks of the machine, which share its CPUs and memory."""
    batch_bytes: int
    """Mean size of a micro-batch that a worker sends."""
    prefetch_factor: int
    """Micro-batches that a worker loads ahead."""
    requested_workers: int | None = None
    """Workers of each rank that the user requested; None means as many as CPUs and
    memory allow."""

    @property
    def cpus_per_rank(self) -> int:
        """CPUs allotted to this process, divided by the ranks; at least 1."""
        return max(1, self.host.allotted_cpus // self.local_ranks)

    def shortage(self, workers: int, worker_bytes: int | None = None) -> str | None:
        """Return the reason why workers do not fit memory or shared memory, if any.

        Args:
            workers: DataLoader workers of each rank.
            worker_bytes: Measured memory of a worker; None assumes ``WORKER_BYTES``.

        Returns:
            The reason, in words; None if the workers fit.
        """
        memory_shortage = self._memory_shortage(workers, worker_bytes)
        if memory_shortage is not None:
            return memory_shortage
        return self._shared_memory_shortage(workers)

    def _memory_shortage(self, workers: int, worker_bytes: int | None) -> str | None:
        """Return the reason why workers do not fit free memory; None if they do."""
        prefetched_bytes = self.prefetch_factor * self.batch_bytes
        process_bytes = WORKER_BYTES if worker_bytes is None else worker_bytes
        bytes_per_worker = process_bytes + prefetched_bytes
        needed_bytes = self.local_ranks * workers * bytes_per_worker
        free_bytes = self.host.ram_available_bytes
        if needed_bytes <= USABLE_SHARE * free_bytes:
            return None
        source = "measured" if worker_bytes else "assumed"
        return (
            f"{self._workers_in_words(workers)} need about"
            f" {format_bytes(needed_bytes)} ({source}), but only"
            f" {format_bytes(free_bytes)} of memory are free"
            f" ({self.host.ram_limit_source})"
        )

    def _shared_memory_shortage(self, workers: int) -> str | None:
        """Return the reason why workers do not fit /dev/shm.

        Returns:
            None if they fit, or if the size of /dev/shm is unknown.
        """
        free_bytes = self.host.shm_free_bytes
        if free_bytes is None:
            return None
        # Each worker's prefetched batches, and the one that it prepares.
        batches_per_worker = self.prefetch_factor + 1
        needed_bytes = (
            self.local_ranks * workers * batches_per_worker * self.batch_bytes
        )
        if needed_bytes <= USABLE_SHARE * free_bytes:
            return None
        return (
            f"{self._workers_in_words(workers)} need {format_bytes(needed_bytes)} of"
            f" /dev/shm, but only {format_bytes(free_bytes)} are free"
        )

    def _workers_in_words(self, workers: int) -> str:
        return f"{workers} DataLoader workers on each of {self.local_ranks} ranks"

    def max_workers(self) -> tuple[int, str]:
        """Return the most workers of a rank to try, and the reason for this limit.

        Raises:
            ExceedsMemory: If the user requested more than fit.
        """
        if self.requested_workers is None:
            wanted = self.cpus_per_rank
            ranks = plural(self.local_ranks, "local rank")
            because = f"{self.host.allotted_cpus} available CPU cores, {ranks}"
        else:
            wanted = self.requested_workers
            because = "--max-workers"
        shortage = self.shortage(wanted)
        if shortage is None:
            return wanted, because
        fitting = self.largest_fitting(wanted)
        if self.requested_workers is not None:
            next_step = (
                f"Use --max-workers {fitting}, enlarge /dev/shm, or request more memory"
                " for the job."
            )
            raise ExceedsMemory(shortage, next_step=next_step)
        return fitting, shortage

    def largest_fitting(self, wanted: int, worker_bytes: int | None = None) -> int:
        """Return the most workers of a rank that fit into memory, up to ``wanted``.

        Args:
            wanted: Workers of each rank, of which fewer may fit.
            worker_bytes: As for ``shortage``.
        """

        def exceeds_memory(workers: int) -> bool:
            return self.shortage(workers, worker_bytes) is not None

        # Beyond some number of workers, all exceed the memory. Bisection returns how
        # many numbers fit, which is the last that fits, as the range begins at 1.
        return bisect.bisect(range(1, wanted + 1), False, key=exceeds_memory)

    def warning(self) -> str | None:
        """Return a warning if more workers are requested than there are CPU cores.

        Returns:
            None if there are enough cores.
        """
        requested = self.requested_workers
        if requested is None or requested <= self.cpus_per_rank:
            return None
        return (
            f"--max-workers {requested} exceeds the {self.cpus_per_rank} CPU cores of"
            f" each of {self.local_ranks} ranks: workers will compete for them"
        )
