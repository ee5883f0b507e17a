"""How many loader workers a rank may have here: CPUs, memory and shared memory, asked before any is started. Pure."""

import bisect
from dataclasses import dataclass

from autotune.base.units import format_bytes
from autotune.errors import ExceedsMemory
from autotune.machine.values import HostFacts

WORKER_BYTES = 96 * 2**20
"""What a forked worker has for itself, assumed until one was measured. Over short windows 9 to 11 MiB were measured
(Python 3.11, torch 2.13, micro-batches of 8 rows of 128); over hours reference counts copy more of the shared pages.
"""
USABLE_SHARE = 0.9
"""Of free memory: the rest is for what grows meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderLimits:
    """The most loader workers that a rank may have."""

    host: HostFacts
    local_ranks: int
    batch_bytes: int
    prefetch_factor: int
    asked: int | None = None
    """By the user, whatever the CPUs say."""

    @property
    def cpus_per_rank(self) -> int:
        """CPUs that this process may use, shared out to the ranks; 1 at least."""
        return max(1, self.host.allotted_cpus // self.local_ranks)

    def ram_bytes(self, workers: int, worker_bytes: int | None = None) -> int:
        """Forecast of what all workers of all ranks take."""
        each = (worker_bytes or WORKER_BYTES) + self.prefetch_factor * self.batch_bytes
        return self.local_ranks * workers * each

    def shm_bytes(self, workers: int) -> int:
        """Forecast of shared memory: what each worker holds ready, and the batch that it is at."""
        return self.local_ranks * workers * (self.prefetch_factor + 1) * self.batch_bytes

    def refusal(self, workers: int, worker_bytes: int | None = None) -> str | None:
        """Why so many workers would not fit; None where they do."""
        needed, there = self.ram_bytes(workers, worker_bytes), self.host.ram_available_bytes
        if needed > USABLE_SHARE * there:
            source = "measured" if worker_bytes else "assumed"
            return (
                f"{workers} loader workers on each of {self.local_ranks} local ranks need about {format_bytes(needed)} "
                f"({source}) of the {format_bytes(there)} of memory that are free ({self.host.ram_limit_source})"
            )
        shared, room = self.shm_bytes(workers), self.host.shm_free_bytes
        if room is not None and shared > USABLE_SHARE * room:
            return (
                f"{workers} loader workers on each of {self.local_ranks} local ranks need {format_bytes(shared)} of "
                f"/dev/shm, which has {format_bytes(room)} free"
            )
        return None

    def most(self) -> tuple[int, str]:
        """Return the most workers to try, and what limits them; ``ExceedsMemory`` if the user asked for more."""
        wanted, because = self.asked, "--max-workers"
        if wanted is None:
            wanted, ranks = self.cpus_per_rank, f"{self.local_ranks} local rank{'s' * (self.local_ranks > 1)}"
            because = f"{self.host.allotted_cpus} allotted CPUs, {ranks}"
        refusal = self.refusal(wanted)
        if refusal is None:
            return wanted, because
        fitting = self.fitting(wanted)
        if self.asked is not None:
            raise ExceedsMemory(
                refusal, next_step=f"Use --max-workers {fitting}, enlarge /dev/shm, or ask the job for more memory."
            )
        return fitting, refusal

    def fitting(self, wanted: int, worker_bytes: int | None = None) -> int:
        """The most workers up to so many that fit."""
        counts = range(1, wanted + 1)
        return bisect.bisect(counts, False, key=lambda count: self.refusal(count, worker_bytes) is not None)

    def warning(self) -> str | None:
        """What to say when the user asks for more than the CPUs; None otherwise."""
        if self.asked is None or self.asked <= self.cpus_per_rank:
            return None
        return (
            f"--max-workers {self.asked} is more than the {self.cpus_per_rank} CPUs that each of {self.local_ranks} "
            "ranks has: workers will take turns"
        )


def batch_bytes(rows: int, row_tokens: int, id_bytes: int, masking_probability: float, samples_per_row: float) -> int:
    """How large a micro-batch is on its way from a worker: ids, places of samples, what is to be predicted."""
    tokens = rows * row_tokens
    predicted = masking_probability * tokens * (4 + id_bytes)
    return round(tokens * id_bytes + predicted + rows * samples_per_row * 8)
