"""The tables of a profile.

A profile has settings to train with, constraints, a fingerprint of the machine,
provenance and evidence.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from autotune.evidence.baseline import BaselineEvidence
from autotune.evidence.confirm import ConfirmEvidence
from autotune.evidence.explore import ExploreEvidence
from autotune.evidence.network import NetworkEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.values import is_pretended
from trainer.config.train_config import (
    PROFILE_SCHEMA_VERSION,
    ModelSettings,
    TrainConfig,
)
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.tables import StrictTable

SHA256_PATTERN = r"^[0-9a-f]{64}$"
"""Pattern of a SHA-256 in hexadecimal, as this project writes it."""


class Evidence(StrictTable):
    """Measurements behind a profile, by command; None if a command measured nothing."""

    probe: ProbeEvidence | None = None
    """Micro-batch sizes that fit, and their throughput."""
    explore: ExploreEvidence | None = None
    """Joint search of the settings of a training step."""
    workers: WorkersEvidence | None = None
    """Throughput by number of DataLoader workers."""
    network: NetworkEvidence | None = None
    """Gradient synchronisation, and scaling over nodes."""
    confirm: ConfirmEvidence | None = None
    """Throughput of the tuned settings, as promised and as delivered by training."""
    baseline: BaselineEvidence | None = None
    """Speed of the tuned settings, compared with defaults."""


class Constraints(StrictTable):
    """Limits that the user set: memory, headroom and global batch."""

    memory_budget_bytes: PositiveInt
    """Memory of a rank: on CUDA all device memory of its process, on a CPU what
    training adds to the program."""
    headroom_share: Annotated[float, Field(ge=0, lt=1)]
    """Share of the largest micro-batch size that fits, left unused, 0 to 1."""
    global_batch_tokens: PositiveInt
    """Non-padding tokens of one optimizer step over all ranks."""


class Fingerprint(StrictTable):
    """Machine, versions, model and dataset of the measurements.

    If one of them changes, some or all figures of the profile no longer hold.
    """

    device: Literal["cpu", "cuda"]
    """Device type that was measured."""
    gpu_name: str | None = None
    """Name of the GPU, as its driver reports it."""
    gpu_count: NonNegativeInt
    """Number of visible GPUs; 0 on a CPU."""
    gpu_total_bytes: PositiveInt | None = None
    """Memory of one GPU."""
    gpu_mig: bool | None = None
    """True if MIG is enabled on the GPU."""
    gpu_power_cap_w: float | None = None
    """Enforced power limit of the GPU."""
    driver: str | None = None
    """Version of the GPU driver."""
    cuda: str | None = None
    """CUDA version that torch was built for."""
    torch: str
    """Version of torch."""
    transformers: str
    """Version of transformers."""
    python: str
    """Version of Python."""
    cpu_model: str | None = None
    """Name of the processor."""
    allotted_cpus: PositiveInt
    """CPUs that the process may use: the minimum of its affinity, cgroup and SLURM
    limits."""
    ram_total_bytes: PositiveInt
    """Memory of the host."""
    data_filesystem: str | None = None
    """Type of the file system that holds the dataset."""
    model_sha256: str
    """SHA-256 of the model's config, without its name."""
    dataset_hash: str
    """SHA-256 of the dataset's manifest."""

    @property
    def bytes_known(self) -> Literal["measured", "allocator"]:
        """Origin of the profile's sizes in bytes.

        ``measured`` on a real device; ``allocator`` on a pretended GPU, as only torch's
        allocator is real there.
        """
        return "allocator" if is_pretended(self.driver) else "measured"


class Provenance(StrictTable):
    """Origin of the profile: version, time, commands and trial log."""

    tool_version: str
    """Version of encoder-autotune."""
    created_utc: str
    """Time at which the profile was written."""
    commands: list[str]
    """Commands that wrote the profile, oldest first. Untrusted in a foreign profile:
    shown, never suggested."""
    slurm_job_id: str | None = None
    """SLURM job that measured; None outside of a job."""
    trial_log_sha256: str
    """Hash of all records in the trial log of this model, dataset, device and sequence
    length."""
    trial_log_until_utc: str | None = None
    """Time of the last of these records; None without any, and in older profiles, whose
    hash cannot be recomputed."""


class Profile(StrictTable):
    """All tables of a profile except the content hash, which is computed from them."""

    schema_version: Literal[2] = PROFILE_SCHEMA_VERSION
    """Version of the profile's format."""
    train: TrainConfig
    """Settings that the trainer reads."""
    constraints: Constraints
    fingerprint: Fingerprint
    provenance: Provenance
    evidence: Evidence

    @property
    def local_ranks(self) -> int:
        """Ranks on the node that the probe trained with; 1 without a probe."""
        probe = self.evidence.probe
        return 1 if probe is None else probe.local_ranks

    @property
    def parameters(self) -> int | None:
        """Number of model parameters, as the probe counted them.

        None without a probe, or if the probe did not count them.
        """
        probe = self.evidence.probe
        return None if probe is None else probe.parameters

    @property
    def mean_tokens_per_sequence(self) -> float | None:
        """Average non-padding tokens of a sequence in the profile's layout.

        None without a probe.
        """
        probe = self.evidence.probe
        return None if probe is None else probe.mean_tokens_per_sequence


def model_sha256(settings: ModelSettings) -> str:
    """Return a hash that identifies the model, independent of its name."""
    return canonical_sha256(settings.model_dump(mode="json", exclude={"name"}))


def is_sha256(text: str) -> bool:
    """Return whether a text is a SHA-256 in hexadecimal, of 64 lower-case digits."""
    return re.fullmatch(SHA256_PATTERN, text) is not None


def fill_share(profile: Profile) -> float | None:
    """Return the share of non-padding tokens in a sequence, on average.

    Returns:
        Average over the dataset; None without a probe.
    """
    tokens = profile.mean_tokens_per_sequence
    if tokens is None:
        return None
    return tokens / profile.train.seq_length_tokens


def update_profile(
    profile: Profile,
    train: TrainConfig,
    *,
    command: str,
    evidence: Mapping[str, object],
    dropped_commands: Sequence[str] = (),
    provenance: Mapping[str, object] | None = None,
) -> Profile:
    """Return the profile with the settings and the evidence of a command.

    Args:
        profile: Profile to update.
        train: Settings to train with; if they differ from the profile's, the evidence
            of a baseline and of a confirmation is dropped.
        command: Command that ran, which becomes the newest of the recorded commands.
        evidence: New tables of the evidence, by their names.
        dropped_commands: Commands whose evidence is dropped, and which are no longer
            recorded.
        provenance: New fields of the provenance, by their names; None changes none.
    """
    dropped = list(dropped_commands)
    if train != profile.train:
        # They hold only for the settings that they were measured with.
        dropped += ["baseline", "confirm"]
    earlier_commands = [
        name for name in profile.provenance.commands if name not in (*dropped, command)
    ]
    new_provenance = {"commands": [*earlier_commands, command], **(provenance or {})}
    new_evidence: dict[str, object] = {**dict.fromkeys(dropped), **evidence}
    return profile.model_copy(
        update={
            "train": train,
            "provenance": profile.provenance.model_copy(update=new_provenance),
            "evidence": profile.evidence.model_copy(update=new_evidence),
        }
    )
