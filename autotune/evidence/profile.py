"""The tables of a profile.

A profile has its subject, the settings that tuning chose, constraints, a fingerprint of
the machine, provenance and evidence.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from autotune.base.defaults import HEADROOM_SHARE
from autotune.base.wording import plural
from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.argument import Argument
from autotune.evidence.baseline import BaselineEvidence
from autotune.evidence.confirm import ConfirmEvidence
from autotune.evidence.explore import ExploreEvidence
from autotune.evidence.network import NetworkEvidence
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.values import MeasuredGpu
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.tables import StrictTable
from trainer.formats.train_config import (
    PROFILE_SCHEMA_VERSION,
    ModelSettings,
    TrainConfig,
)

SHA256_PATTERN = r"^[0-9a-f]{64}$"
"""Pattern of a SHA-256 in hexadecimal, as this project writes it."""
_BUNDLED_TRAINER = "mlm"
"""Kind of the subject whose settings are in ``[train]``."""
_SEARCHED_SIZE = "micro_batch_size"
"""Argument of the bundled trainer whose largest value is searched."""


class SubjectTable(StrictTable):
    """The training step that was tuned: the bundled trainer, or code of yours."""

    kind: str
    """Kind of the subject, as in ``--subject``: ``mlm`` is the bundled trainer, ``own``
    functions of yours."""
    name: str
    """Short name, which file names have."""
    words: str
    """The subject in words: its functions with their fixed arguments."""
    size: str
    """Argument whose largest value is searched."""
    noun: str | None = None
    """One of the size in words, such as ``sequence``; absent if the argument's name
    says it."""
    unit: str
    """Unit of throughput, as a plural: ``tokens``, ``samples``."""
    units_per_size: PositiveFloat
    """Units that one more of the size adds."""
    table: dict[str, Any] = Field(default_factory=dict)
    """Everything else that defines the subject; empty for the bundled trainer, which
    ``[train]`` defines."""
    has_loader: bool = False
    """True if the subject also has a loader, so that its workers can be swept."""
    sources: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of your source by role: ``step``, ``loader``. It covers all modules that
    importing the function imported, outside of the installed packages."""

    @property
    def arguments(self) -> dict[str, Argument]:
        """Fixed arguments of your functions; empty for the bundled trainer."""
        arguments = self.table.get("arguments", {})
        return dict(arguments) if isinstance(arguments, dict) else {}

    def size_words(self, size: int) -> str:
        """Return a value of the searched argument in words."""
        if self.noun is not None:
            return plural(size, self.noun)
        return f"{self.size}={size}"

    def function(self, role: str) -> str | None:
        """Return the name of your function for a role, such as ``step``, if any."""
        name = self.table.get(f"{role}_function")
        return name if isinstance(name, str) else None


def trainer_subject(train: TrainConfig) -> SubjectTable:
    """Return the bundled trainer with these settings as a subject."""
    return SubjectTable(
        kind=_BUNDLED_TRAINER,
        name=train.model.name,
        words=train.model.name,
        size=_SEARCHED_SIZE,
        noun="sequence",
        unit="tokens",
        units_per_size=float(train.seq_length_tokens),
        has_loader=True,
    )


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
    """Speed of the tuned settings, compared with untuned ones."""


class Constraints(StrictTable):
    """Limits that the user set: memory, headroom and global batch."""

    memory_budget_bytes: PositiveInt | None = None
    """Memory of a rank: on CUDA all device memory of its process, on a CPU what
    training adds to the program. None without a probe."""
    headroom_share: Annotated[float, Field(ge=0, lt=1)] = HEADROOM_SHARE
    """Share of the largest size that fits, left unused, 0 to 1."""
    global_batch_tokens: PositiveInt | None = None
    """Non-padding tokens of one optimizer step over all ranks; None for code of yours,
    which sets its global batch."""


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
    """SHA-256 of the model's config, without its name; for code of yours that of its
    functions, arguments and source."""
    dataset_hash: str
    """SHA-256 of the dataset's manifest; empty for code of yours, which has its own
    data."""

    @property
    def gpu(self) -> MeasuredGpu:
        """The GPU by name and driver."""
        return MeasuredGpu(name=self.gpu_name, driver=self.driver)

    @property
    def bytes_known(self) -> Literal["measured", "allocator"]:
        """Origin of the profile's sizes in bytes.

        ``measured`` on a real device; ``allocator`` on a pretended GPU, as only torch's
        allocator is real there.
        """
        return "measured" if self.gpu.takes_time else "allocator"


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

    schema_version: Literal[3] = PROFILE_SCHEMA_VERSION
    """Version of the profile's format."""
    subject: SubjectTable
    train_table: TrainConfig | None = Field(default=None, alias="train")
    """Settings that the bundled trainer reads; absent for other subjects."""
    settings: dict[str, Argument] = Field(default_factory=dict)
    """Values to use in your code, by argument; absent for the bundled trainer."""
    constraints: Constraints
    fingerprint: Fingerprint
    provenance: Provenance
    evidence: Evidence

    @model_validator(mode="after")
    def _has_settings(self) -> Self:
        """Reject a profile without settings, or with two tables of them."""
        if self.train_table is None and not self.settings:
            raise ValueError("a profile requires a [train] or a [settings] table")
        if self.train_table is not None and self.settings:
            raise ValueError("a profile cannot have both [train] and [settings]")
        return self

    @property
    def has_train(self) -> bool:
        """True if the subject is the bundled trainer, whose settings are ``train``."""
        return self.train_table is not None

    @property
    def train(self) -> TrainConfig:
        """Settings of the bundled trainer.

        Raises:
            NotCheckable: If the profile is of another subject.
        """
        if self.train_table is None:
            raise lacks_train(
                self.subject,
                "this",
                "Use its values in your code: autotune profile show PROFILE",
            )
        return self.train_table

    def with_train(self, train: TrainConfig) -> "Profile":
        """Return the profile with other settings of the bundled trainer."""
        return self.model_copy(
            update={"train_table": train, "subject": trainer_subject(train)}
        )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that training runs on."""
        if self.train_table is not None:
            return self.train_table.device
        return self.fingerprint.device

    @property
    def size(self) -> Argument | None:
        """Chosen value of the searched argument; None if none was chosen or set."""
        if self.train_table is not None:
            return self.train_table.micro_batch_size
        name = self.subject.size
        return self.settings.get(name, self.subject.arguments.get(name))

    def with_size(self, size: int) -> "Profile":
        """Return the profile with another size."""
        if self.train_table is not None:
            chosen = {"micro_batch_size": size}
            return self.with_train(self.train_table.model_copy(update=chosen))
        settings = {**self.settings, self.subject.size: size}
        return self.model_copy(update={"settings": settings})

    @property
    def num_workers(self) -> int | None:
        """DataLoader workers of each rank; None if none were chosen or set."""
        if self.train_table is not None:
            return self.train_table.data.num_workers
        arguments = {**self.subject.arguments, **self.settings}
        count = arguments.get("num_workers")
        return count if isinstance(count, int) else None

    @property
    def memory_budget_bytes(self) -> int:
        """Memory budget of a rank.

        Raises:
            ProfileRejected: If the profile has none.
        """
        budget_bytes = self.constraints.memory_budget_bytes
        if budget_bytes is None:
            raise _lacks_constraint("memory_budget_bytes")
        return budget_bytes

    @property
    def global_batch_tokens(self) -> int:
        """Non-padding tokens of an optimizer step over all ranks.

        Raises:
            ProfileRejected: If the profile has none.
        """
        tokens = self.constraints.global_batch_tokens
        if tokens is None:
            raise _lacks_constraint("global_batch_tokens")
        return tokens

    @property
    def seq_length_tokens(self) -> int | None:
        """Sequence length of all trials; None if they may have any."""
        if self.train_table is None:
            return None
        return self.train_table.seq_length_tokens

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


def _lacks_constraint(key: str) -> ProfileRejected:
    """Return the error about a profile without a constraint, which a probe writes."""
    return ProfileRejected(
        f"the profile has no constraints.{key}, which this requires",
        next_step="Probe again: autotune probe",
    )


def lacks_train(subject: SubjectTable, user: str, next_step: str) -> NotCheckable:
    """Return the error about a profile that has no settings of the bundled trainer.

    Args:
        subject: Subject of the profile.
        user: Command, or another user, that requires these settings.
        next_step: What to do about it.
    """
    return NotCheckable(
        f"{user} requires settings of the bundled trainer, and the profile is of your"
        f" own code: {subject.words}",
        next_step=next_step,
    )


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
    if tokens is None or not profile.has_train:
        return None
    return tokens / profile.train.seq_length_tokens


def update_profile(
    profile: Profile,
    *,
    command: str,
    evidence: Mapping[str, object],
    changed: Profile | None = None,
    dropped_commands: Sequence[str] = (),
    provenance: Mapping[str, object] | None = None,
) -> Profile:
    """Return the profile with the settings and the evidence of a command.

    If settings differ from the profile's, the evidence of a baseline and of a
    confirmation is dropped.

    Args:
        profile: Profile to update.
        command: Command that ran, which becomes the newest of the recorded commands.
        evidence: New tables of the evidence, by their names.
        changed: The profile with other settings; None keeps them.
        dropped_commands: Commands whose evidence is dropped, and which are no longer
            recorded.
        provenance: New fields of the provenance, by their names; None changes none.
    """
    changed = changed or profile
    dropped = list(dropped_commands)
    if changed != profile:
        # They hold only for the settings that they were measured with.
        dropped += ["baseline", "confirm"]
    earlier_commands = [
        name for name in profile.provenance.commands if name not in (*dropped, command)
    ]
    new_provenance = {"commands": [*earlier_commands, command], **(provenance or {})}
    new_evidence: dict[str, object] = {**dict.fromkeys(dropped), **evidence}
    return changed.model_copy(
        update={
            "provenance": profile.provenance.model_copy(update=new_provenance),
            "evidence": profile.evidence.model_copy(update=new_evidence),
        }
    )
