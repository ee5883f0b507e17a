"""Checks of the ranks: do they match each other, and the machine of the profile?"""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.code_hash import code_sha256
from trainer.config.resolve import ResolvedConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig, ProfileMismatch
from trainer.health.events import EventRow
from trainer.preflight.allotted_cpus import allotted_cpus
from trainer.preflight.start_warning import start_warning


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Host of a rank, and the facts by which ranks are compared.

    Messages show the names of the fields.
    """

    host: str
    configuration: str
    """SHA-256 of the configuration."""
    code: str
    """SHA-256 of the trainer's sources."""
    dataset: str
    """Hash of the dataset."""
    torch: str
    transformers: str
    python: str
    device: str
    """Name of the GPU, or ``cpu``."""
    device_memory_bytes: int | None
    allotted_cpus: int


_MUST_AGREE = {
    "configuration": "Start every rank with the same profile and the same --set.",
    "code": "Install the same version of this package on every node.",
    "dataset": "Use the same dataset on every node; the copy on one node differs.",
    "torch": "Install the same version of torch on every node.",
    "transformers": "Install the same version of transformers on every node.",
    "python": "Use the same version of Python on every node.",
}
"""Facts that must be the same on all ranks, with the next step if they are not."""
_SHOULD_AGREE = ("device", "device_memory_bytes", "allotted_cpus")
"""Facts in which a rank that differs slows down all others."""
_SHOWN_RANKS = 4
"""Most ranks that a message names by number, as a job may have hundreds."""
_SHOWN_CHARACTERS = 24
"""Longest part of a value in a message, enough to tell two hashes apart."""
_VERIFY_AGAIN = "Check on this machine: autotune profile verify PROFILE"
_SAME_MEMORY_SHARE = 0.97
"""Least share of a profile's GPU memory that the same GPU has here: NVML's total, which
profiles have, is up to 3 % above torch's."""


def gather_facts(
    resolved: ResolvedConfig, dataset_hash: str, ranks: Ranks
) -> list[RankFacts]:
    """Return the facts of every rank, by rank; all ranks call this function."""
    return ranks.all_gather_object(
        facts_of_rank(resolved, dataset_hash=dataset_hash, ranks=ranks)
    )


def facts_of_rank(
    resolved: ResolvedConfig, *, dataset_hash: str, ranks: Ranks
) -> RankFacts:
    """Return the facts of this rank."""
    return RankFacts(
        host=platform.node(),
        configuration=resolved.config_sha256,
        code=code_sha256(),
        dataset=dataset_hash,
        torch=importlib.metadata.version("torch"),
        transformers=importlib.metadata.version("transformers"),
        python=platform.python_version(),
        device=ranks.device_name,
        device_memory_bytes=ranks.device_memory_bytes,
        allotted_cpus=allotted_cpus(ranks.cpus_before_binding),
    )


def check_ranks(
    facts_by_rank: Sequence[RankFacts], fingerprint: Mapping[str, Any]
) -> list[EventRow]:
    """Compare all ranks with each other and with the profile.

    Args:
        facts_by_rank: Facts of every rank.
        fingerprint: Facts of the machine that the profile was tuned on.

    Returns:
        Warnings, each once.

    Raises:
        BadConfig: If ranks differ in a way that would make training silently wrong.
        ProfileMismatch: If the profile was tuned for more GPU memory than some rank
            has.
    """
    warnings = compare_ranks(facts_by_rank)
    known_messages = {warning.message for warning in warnings}
    for facts in facts_by_rank:
        for warning in compare_profile(fingerprint, facts):
            if warning.message not in known_messages:
                known_messages.add(warning.message)
                warnings.append(warning)
    return warnings


def compare_ranks(facts_by_rank: Sequence[RankFacts]) -> list[EventRow]:
    """Compare all ranks and return warnings.

    Raises:
        BadConfig: If a difference would make training silently wrong.
    """
    for name, next_step in _MUST_AGREE.items():
        difference = _difference(facts_by_rank, name)
        if difference is not None:
            raise BadConfig(
                f"ranks differ in their {name}: {difference}", next_step=next_step
            )
    warnings = []
    for name in _SHOULD_AGREE:
        difference = _difference(facts_by_rank, name)
        if difference is not None:
            warnings.append(
                start_warning(
                    f"ranks differ in their {name.replace('_', ' ')}: {difference};"
                    " every step waits for the slowest",
                    "Request nodes of one kind, with the same number of CPU cores.",
                )
            )
    return warnings


def _difference(facts_by_rank: Sequence[RankFacts], name: str) -> str | None:
    """Return each value of a fact with the ranks that have it, as text.

    None if all ranks have the same.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        value = str(getattr(facts, name))
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) <= 1:
        return None
    return "; ".join(
        f"{value[:_SHOWN_CHARACTERS]} on {name_ranks(ranks)}"
        for value, ranks in ranks_by_value.items()
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, the first ones by number."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = f"{noun} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}"
    more = len(ranks) - _SHOWN_RANKS
    if more > 0:
        text += f" and {more} more"
    return text


def compare_profile(fingerprint: Mapping[str, Any], facts: RankFacts) -> list[EventRow]:
    """Compare a rank's machine with the profile's, and return warnings.

    A value that the fingerprint lacks, or that is of another type, is not compared.

    Raises:
        ProfileMismatch: If its GPU has less memory.
    """
    _check_gpu_memory(fingerprint.get("gpu_total_bytes"), facts.device_memory_bytes)
    warnings = []
    if fingerprint.get("device") == "cpu" and facts.device != "cpu":
        warnings.append(
            start_warning(
                "the profile was tuned for a CPU, but this rank has a GPU",
                _VERIFY_AGAIN,
            )
        )
    warnings += _compare_text("gpu name", fingerprint.get("gpu_name"), facts.device)
    # What follows a "+" is the build, such as cu128: it is no other version.
    torch_version = facts.torch.partition("+")[0]
    warnings += _compare_text("torch", fingerprint.get("torch"), torch_version)
    warnings += _compare_cpus(fingerprint.get("allotted_cpus"), facts.allotted_cpus)
    return warnings


def _check_gpu_memory(tuned_bytes: object, device_bytes: int | None) -> None:
    """Raise ``ProfileMismatch`` if a GPU has less memory than the profile's."""
    if not isinstance(tuned_bytes, int) or device_bytes is None:
        return
    if device_bytes < _SAME_MEMORY_SHARE * tuned_bytes:
        raise ProfileMismatch(
            f"the profile was tuned for a GPU of {tuned_bytes / 2**30:.0f} GiB; this"
            f" one has only {device_bytes / 2**30:.0f} GiB",
            next_step=(
                "Write a profile for this GPU: autotune tune --model MODEL --data DIR"
            ),
        )


def _compare_text(name: str, tuned: object, actual: str) -> list[EventRow]:
    """Return a warning if a GPU or a version is not the profile's."""
    if not isinstance(tuned, str) or tuned.partition("+")[0] == actual:
        return []
    message = f"the profile was tuned with {name} {tuned}; this rank has {actual}"
    return [start_warning(message, _VERIFY_AGAIN)]


def _compare_cpus(tuned_cpus: object, cpus: int) -> list[EventRow]:
    """Return a warning if a rank has fewer CPUs than the profile's machine."""
    if not isinstance(tuned_cpus, int) or cpus >= tuned_cpus:
        return []
    return [
        start_warning(
            f"the profile was tuned with {tuned_cpus} available CPU cores; this"
            f" rank has {cpus}",
            "Request as many (SLURM: --cpus-per-task), or run: autotune workers"
            " PROFILE",
        )
    ]
