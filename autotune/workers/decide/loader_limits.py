"""Limits of DataLoader workers per rank: CPUs, memory and shared memory, checked before any is started. Pure."""

import bisect
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.errors import ExceedsMemory
from autotune.machine.values import HostFacts

WORKER_BYTES = 96 * 2**20
"""Private memory of a forked worker, assumed until one is measured. Short windows
showed 9 to 11 MiB (Python 3.11, torch 2.13, 8 sequences of 128 tokens), but over hours
reference counts copy more of the shared pages.
"""
USABLE_SHARE = 0.9
"""Share of free memory that workers may use; the rest is for growth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """Limits of the DataLoader workers of a rank."""

    host: HostFacts
    local_ranks: int
    batch_bytes: int
    prefetch_factor: int
    asked: int | None = None
    """Number of workers that the user requested."""

    @property
    def cpus_per_rank(self) -> int:
        """CPUs allotted to this process, divided by the ranks; at least 1."""
        return max(1, self.host.allotted_cpus // self.local_ranks)

    def refusal(self, workers: int, worker_bytes: int | None = None) -> str | None:
        """Return the reason why ``workers`` do not fit; None if they do."""
        need = f"{workers} DataLoader workers on each of {self.local_ranks} ranks need"
        each_bytes = (
            worker_bytes or WORKER_BYTES
        ) + self.prefetch_factor * self.batch_bytes
        needed, there = (
            self.local_ranks * workers * each_bytes,
            self.host.ram_available_bytes,
        )
        if needed > USABLE_SHARE * there:
            source = "measured" if worker_bytes else "assumed"
            free = (
                f"only {format_bytes(there)} of memory are free"
                f" ({self.host.ram_limit_source})"
            )
            return f"{need} about {format_bytes(needed)} ({source}), but {free}"
        # Each worker's prefetched batches, and the one that it prepares.
        shared = (
            self.local_ranks * workers * (self.prefetch_factor + 1) * self.batch_bytes
        )
        room = self.host.shm_free_bytes
        if room is not None and shared > USABLE_SHARE * room:
            return (
                f"{need} {format_bytes(shared)} of /dev/shm, but only"
                f" {format_bytes(room)} are free"
            )
        return None

    def most(self) -> tuple[int, str]:
        """Return the most workers to try and the reason.

        Raises:
            ExceedsMemory: If the user requested more.
        """
        wanted, because = self.asked, "--max-workers"
        if wanted is None:
            wanted, ranks = (
                self.cpus_per_rank,
                f"{self.local_ranks} local rank{'s' * (self.local_ranks > 1)}",
            )
            because = f"{self.host.allotted_cpus} available CPU cores, {ranks}"
        if (refusal := self.refusal(wanted)) is None:
            return wanted, because
        fitting = self.fitting(wanted)
        if self.asked is not None:
            next_step = (
                f"Use --max-workers {fitting}, enlarge /dev/shm, or request more memory"
                " for the job."
            )
            raise ExceedsMemory(refusal, next_step=next_step)
        return fitting, refusal

    def fitting(self, wanted: int, worker_bytes: int | None = None) -> int:
        """Return the most workers that fit, up to ``wanted``."""
        counts = range(1, wanted + 1)
        return bisect.bisect(
            counts,
            False,
            key=lambda count: self.refusal(count, worker_bytes) is not None,
        )

    def warning(self) -> str | None:
        """Return a warning if the user requests more workers than CPU cores.

        None otherwise.
        """
        if self.asked is None or self.asked <= self.cpus_per_rank:
            return None
        return (
            f"--max-workers {self.asked} exceeds the {self.cpus_per_rank} CPU cores of"
            f" each of {self.local_ranks} ranks: workers will compete for them"
        )


def batch_bytes(
    rows: int,
    seq_length_tokens: int,
    id_bytes: int,
    masking_probability: float,
    samples_per_sequence: float,
) -> int:
    """Return the bytes of a micro-batch that a worker sends: ids, sample boundaries, masked tokens."""
    tokens = rows * seq_length_tokens
    predicted = masking_probability * tokens * (4 + id_bytes)
    return round(tokens * id_bytes + predicted + rows * samples_per_sequence * 8)
