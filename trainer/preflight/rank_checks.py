"""Checks of the ranks: do they match each other, and the machine of the profile?"""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.resolve import ResolvedConfig
from trainer.formats.code_hash import code_sha256
from trainer.formats.errors import BadConfig, ProfileMismatch
from trainer.formats.events import EventRow
from trainer.preflight.allotted_cpus import allotted_cpus
from trainer.preflight.ranks_text import ranks_text
from trainer.preflight.start_warning import start_warning
from trainer.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Host of a rank, and the facts by which ranks are compared.

    Messages show the names of the fields.
    """

    host: str
    """Name of the rank's node; ranks may differ in it."""
    configuration: str
    """SHA-256 of the configuration."""
    code: str
    """SHA-256 of the trainer's sources."""
    dataset: str
    """Hash of the dataset."""
    torch: str
    """Version of torch, with its build: ``2.10.0+cu128``."""
    transformers: str
    """Version of transformers."""
    python: str
    """Version of Python."""
    device: str
    """Name of the GPU, or ``cpu``."""
    device_memory_bytes: int | None
    """Total GPU memory as torch reports it, in bytes; None on a CPU."""
    allotted_cpus: int
    """Number of CPUs that the process may use, before it is bound to some of them."""
    gpu_uuid: str | None = None
    """UUID of the GPU, in which ranks differ; None on a CPU."""


_MUST_AGREE = {
    "configuration": "Start every rank with the same profile and the same --set.",
    "code": "Install the same version of this package on every node.",
    "dataset": "Use the same dataset on every node; the copy on one node differs.",
    "torch": "Install the same version of torch on every node.",
    "transformers": "Install the same version of transformers on every node.",
    "python": "Use the same version of Python on every node.",
}
"""Fields of ``RankFacts`` that must be the same on all ranks, with the next step if
they are not."""
_SHOULD_AGREE = ("device", "device_memory_bytes", "allotted_cpus")
"""Fields of ``RankFacts`` by which one rank may be slower than the others, which then
wait for it in every step."""
_SHOWN_CHARACTERS = 24
"""Longest part of a value in a message, enough to tell two hashes apart."""
_VERIFY_AGAIN = "Check on this machine: autotune profile verify PROFILE"
"""Next step if a rank's machine is not the one of the profile."""
_SAME_MEMORY_SHARE = 0.97
"""Share of a profile's GPU memory from which a rank's GPU is taken to have as much.
Profiles have NVML's total, which is up to 3 % above torch's for the same GPU."""


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
        gpu_uuid=ranks.gpu_uuid,
    )


def check_ranks(
    facts_by_rank: Sequence[RankFacts], fingerprint: Mapping[str, Any]
) -> list[EventRow]:
    """Compare all ranks with each other, and each with the profile.

    Args:
        facts_by_rank: Facts of every rank.
        fingerprint: Facts of the machine that the profile was tuned on, which may lack
            any of them; ``compare_profile`` names their keys.

    Returns:
        Warnings, without those that repeat another rank's.

    Raises:
        BadConfig: If ranks differ in a way that would make training silently wrong.
        ProfileMismatch: If the profile was tuned for more GPU memory than some rank
            has.
    """
    warnings = compare_ranks(facts_by_rank)
    messages = {warning.message for warning in warnings}
    for facts in facts_by_rank:
        for warning in compare_profile(fingerprint, facts):
            if warning.message not in messages:
                messages.add(warning.message)
                warnings.append(warning)
    return warnings


def compare_ranks(facts_by_rank: Sequence[RankFacts]) -> list[EventRow]:
    """Compare all ranks with each other.

    Returns:
        A warning for each fact of ``_SHOULD_AGREE`` in which they differ.

    Raises:
        BadConfig: If they differ in a fact of ``_MUST_AGREE``.
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
    """Return the values of a fact with the ranks that have them, as text.

    Args:
        facts_by_rank: Facts of every rank.
        name: Field of ``RankFacts`` to compare.

    Returns:
        None if all ranks have the same value.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        value = str(getattr(facts, name))
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) <= 1:
        return None
    return "; ".join(
        f"{value[:_SHOWN_CHARACTERS]} on {ranks_text(ranks)}"
        for value, ranks in ranks_by_value.items()
    )


def compare_profile(fingerprint: Mapping[str, Any], facts: RankFacts) -> list[EventRow]:
    """Compare a rank's machine with the profile's, and return warnings.

    Profiles may be written by hand, so a value that the fingerprint lacks, or that is
    of another type, is not compared.

    Raises:
        ProfileMismatch: If the rank's GPU has less memory than the profile's.
    """
    tuned_gpu_bytes = fingerprint.get("gpu_total_bytes")
    tuned_device = fingerprint.get("device")
    tuned_gpu_name = fingerprint.get("gpu_name")
    tuned_torch = fingerprint.get("torch")
    tuned_cpus = fingerprint.get("allotted_cpus")

    if isinstance(tuned_gpu_bytes, int) and facts.device_memory_bytes is not None:
        _check_gpu_memory(tuned_gpu_bytes, facts.device_memory_bytes)
    warnings = []
    if tuned_device == "cpu" and facts.device != "cpu":
        warnings.append(
            start_warning(
                "the profile was tuned for a CPU, but this rank has a GPU",
                _VERIFY_AGAIN,
            )
        )
    if isinstance(tuned_gpu_name, str) and tuned_gpu_name != facts.device:
        warnings.append(_tuned_with("gpu name", tuned_gpu_name, facts.device))
    if isinstance(tuned_torch, str):
        version = _without_build(facts.torch)
        if _without_build(tuned_torch) != version:
            warnings.append(_tuned_with("torch", tuned_torch, version))
    if isinstance(tuned_cpus, int) and facts.allotted_cpus < tuned_cpus:
        warnings.append(
            start_warning(
                f"the profile was tuned with {tuned_cpus} available CPU cores; this"
                f" rank has {facts.allotted_cpus}",
                "Request as many (SLURM: --cpus-per-task), or run: autotune workers"
                " PROFILE",
            )
        )
    return warnings


def _check_gpu_memory(tuned_bytes: int, device_bytes: int) -> None:
    """Raise ``ProfileMismatch`` if a GPU has less memory than the profile's."""
    if device_bytes < _SAME_MEMORY_SHARE * tuned_bytes:
        raise ProfileMismatch(
            f"the profile was tuned for a GPU of {tuned_bytes / 2**30:.0f} GiB; this"
            f" one has only {device_bytes / 2**30:.0f} GiB",
            next_step=(
                "Write a profile for this GPU: autotune tune --model MODEL --data DIR"
            ),
        )


def _without_build(version: str) -> str:
    """Return a version of torch without its build, such as ``+cu128``."""
    return version.partition("+")[0]


def _tuned_with(name: str, tuned: str, actual: str) -> EventRow:
    """Return the warning that a GPU or a version is not the profile's."""
    message = f"the profile was tuned with {name} {tuned}; this rank has {actual}"
    return start_warning(message, _VERIFY_AGAIN)
