"""The tuned profile, a TOML file.

It has settings, constraints, a fingerprint of the machine, provenance and evidence.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.base.interval import NonNegative, Positive
from autotune.baseline.values import BaselineEvidence
from autotune.errors import BadInput, NotCheckable, ProfileRejected
from autotune.machine.values import is_pretended
from autotune.memory.values import ProbeEvidence
from autotune.network.values import NetworkEvidence
from autotune.search.values import ExploreEvidence
from autotune.workers.values import WorkersEvidence
from trainer.config.resolve import PROFILE_HASH_KEY
from trainer.config.tables import StrictTable, TableT, canonical_sha256, parse_table
from trainer.config.train_config import (
    PROFILE_SCHEMA_VERSION,
    ModelSettings,
    TrainConfig,
)
from trainer.errors import BadConfig


class Evidence(StrictTable):
    """Measurements behind a profile, by command; None if a command measured nothing."""

    probe: ProbeEvidence | None = None
    explore: ExploreEvidence | None = None
    workers: WorkersEvidence | None = None
    network: NetworkEvidence | None = None
    baseline: BaselineEvidence | None = None


_HEADER = (
    (
        "A tuned profile. The trainer reads [train]. If you edit it, content_sha256 no"
        " longer matches, and reports show"
    ),
    "the profile as modified. Names contain the units; a _share is between 0 and 1.",
)

# Always written, so that a reader sees what was decided; everything else only if it
# differs from its default.
_ALWAYS_WRITTEN = (
    "seq_length_tokens",
    "layout",
    "micro_batch_size",
    "global_batch_size",
    "precision",
    "device",
    "seed",
)


class Constraints(StrictTable):
    """Limits that the user set: memory, headroom and global batch."""

    memory_budget_bytes: Positive
    """Memory of a rank: on CUDA all device memory of its process, on a CPU what
    training adds to the program."""
    headroom_share: Annotated[float, Field(ge=0, lt=1)]
    """Share of the largest micro-batch size that fits, left unused, 0 to 1."""
    global_batch_tokens: Positive
    """Non-padding tokens of one optimizer step over all ranks."""


class Fingerprint(StrictTable):
    """Machine, versions, model and dataset of the measurements.

    With others, some or all figures do not hold.
    """

    device: Literal["cpu", "cuda"]
    """Device type that was measured."""
    gpu_name: str | None = None
    """Name of the GPU, as its driver reports it."""
    gpu_count: NonNegative
    """Number of visible GPUs; 0 on a CPU."""
    gpu_total_bytes: Positive | None = None
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
    allotted_cpus: Positive
    """CPUs that the process may use: the minimum of its affinity, cgroup and SLURM
    limits."""
    ram_total_bytes: Positive
    """Memory of the host."""
    data_filesystem: str | None = None
    """Type of the file system that holds the dataset."""
    model_sha256: str
    """SHA-256 of the model's config, without its name."""
    dataset_hash: str
    """SHA-256 of the dataset's manifest."""

    @property
    def bytes_known(self) -> Literal["measured", "allocator"]:
        """Origin of sizes in bytes.

        It is ``allocator`` on a pretended GPU, of which only torch's allocator is real.
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
    train: TrainConfig
    constraints: Constraints
    fingerprint: Fingerprint
    provenance: Provenance
    evidence: Evidence

    @property
    def local_ranks(self) -> int:
        """Ranks that trained together on the node in the probe; 1 without a probe."""
        probe = self.evidence.probe
        return 1 if probe is None else probe.local_ranks

    @property
    def parameters(self) -> int | None:
        """Number of model parameters, as counted by a trace; None without one."""
        probe = self.evidence.probe
        return None if probe is None else probe.parameters

    @property
    def mean_tokens_per_sequence(self) -> float | None:
        """Average non-padding tokens of a sequence in this layout.

        None without a probe.
        """
        probe = self.evidence.probe
        return None if probe is None else probe.mean_tokens_per_sequence


def model_sha256(settings: ModelSettings) -> str:
    """Return a hash that identifies the model, independent of its name."""
    return canonical_sha256(settings.model_dump(mode="json", exclude={"name"}))


def profile_to_toml(profile: Profile) -> str:
    """Return the profile as TOML, with its content hash."""
    tables: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    changed = profile.train.model_dump(mode="json", exclude_defaults=True)
    # Decided, even if the decision is the default.
    if profile.evidence.workers is not None:
        changed.setdefault("data", {})["num_workers"] = profile.train.data.num_workers
    always = {name: tables["train"][name] for name in _ALWAYS_WRITTEN}
    tables["train"] = always | changed
    return tables_to_toml(tables, _HEADER)


def tables_to_toml(tables: dict[str, Any], header: Sequence[str]) -> str:
    """Return the tables of a profile as TOML, with their hash.

    Args:
        tables: Tables and plain values of the profile.
        header: Comments to write above them.
    """
    import tomlkit

    document = tomlkit.document()
    for line in header:
        document.add(tomlkit.comment(line))
    hashed = tables | {PROFILE_HASH_KEY: canonical_sha256(tables)}
    # In TOML, plain values below a table would belong to it.
    plain = [name for name in hashed if not isinstance(hashed[name], dict)]
    nested = [name for name in hashed if isinstance(hashed[name], dict)]
    for name in (*plain, *nested):
        document.add(name, hashed[name])
    return tomlkit.dumps(document)


def profile_from_tables(tables: dict[str, Any], *, where: str) -> tuple[Profile, bool]:
    """Return a file's profile, and whether its content has the recorded hash.

    Raises:
        BadInput: If it is invalid.
    """
    profile = content_of(Profile, tables, where=where)
    is_intact = tables.get(PROFILE_HASH_KEY) == present_sha256(tables, where=where)
    return profile, is_intact


def content_of(kind: type[TableT], tables: dict[str, Any], *, where: str) -> TableT:
    """Return a file's profile of either kind.

    Raises:
        BadInput: If it is invalid.
    """
    try:
        return parse_table(kind, _hashed_tables(tables), where=where)
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error


def present_sha256(tables: dict[str, Any], *, where: str) -> str:
    """Return a profile's present hash, whatever it records.

    Raises:
        BadInput: If a value has no canonical form.
    """
    try:
        return canonical_sha256(_hashed_tables(tables))
    except (TypeError, ValueError) as error:
        # A date, or a number that is not finite.
        raise BadInput(
            f"{where} contains an unsupported value: {error}",
            next_step="Use numbers, strings, lists and tables only.",
        ) from error


def _hashed_tables(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the content that the hash covers: all but the hash itself."""
    return {key: value for key, value in tables.items() if key != PROFILE_HASH_KEY}


Found = Literal["same", "error", "warning", "info", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of one field of a profile with this machine."""

    field: str
    found: Found
    """``same``, the severity of a difference, or ``unknown`` if it cannot be checked on
    this machine."""
    profile: str
    here: str
    """Value on this machine, or the reason why it cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLogCheck:
    """Comparison of a profile with the trial log beside it."""

    found: Literal["same", "differs", "not recomputable", "no trials"]
    """``same`` if no trial was changed, removed or inserted since the profile was
    written. ``not recomputable`` if the profile does not record up to when trials
    count. ``no trials`` if the log has none of it."""
    trials: int
    """Trials of the profile's model, dataset and sequence length, up to the time it was
    written."""
    added: int
    others: int
    """Trials in the trial log that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that match no trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile."""

    checks: tuple[Check, ...]

    def with_result(self, result: Found) -> tuple[Check, ...]:
        """Return the checks with this result."""
        return tuple(check for check in self.checks if check.found == result)

    def raise_if_bad(self, name: str) -> None:
        """Raise an error unless every field was compared and none is an error.

        Raises:
            ProfileRejected: If a difference invalidates the figures.
            NotCheckable: If some differences are unknown.
        """
        errors = self.with_result("error")
        if errors:
            differences = "; ".join(
                f"{check.field} is {check.here!r} here,"
                f" {check.profile!r} in the profile"
                for check in errors
            )
            next_step = (
                "Tune here: autotune tune --model MODEL --data DIR; or use the"
                " profile's own machine, model and dataset."
            )
            raise ProfileRejected(
                f"{name} does not match this machine, model or dataset: {differences}",
                next_step=next_step,
                docs=mismatch_docs(check.field for check in errors),
            )
        unknown = [check.field for check in self.with_result("unknown")]
        if unknown:
            command = shlex.join(["autotune", "profile", "verify", name])
            next_step = (
                f"Run it on the machine that trains, with the dataset: {command}"
                " --data DIR"
            )
            if set(unknown) <= {"dataset_hash", "data_filesystem"}:
                next_step = f"Pass the dataset: {command} --data DIR"
            raise NotCheckable(
                f"cannot be verified here: {', '.join(unknown)}", next_step=next_step
            )


def mismatch_docs(fields: Iterable[str]) -> str | None:
    """Return the section of the FAQ about fields of a fingerprint that differ.

    Returns:
        That on datasets if nothing else differs; None for the error's own.
    """
    return "dataset-mismatch" if set(fields) == {"dataset_hash"} else None


_SHA256 = r"^[0-9a-f]{64}$"
Decision = Literal["approved", "rejected"]
State = Literal["not reviewed", "approved", "rejected", "voided"]


class ApprovalRecord(StrictTable):
    """The last approval or rejection, in ``review.json``.

    The name in it is not authenticated.
    """

    schema_version: Literal[2] = 2
    profile_sha256: Annotated[str, Field(pattern=_SHA256)]
    """Hash of the reviewed content."""
    decision: Decision
    by: Annotated[str, Field(min_length=1, max_length=200)]
    note: Annotated[str, Field(max_length=2000)] | None = None
    time_utc: Annotated[str, Field(max_length=40)]
    as_edited: bool = False
    """True if the content was approved although it was modified after it was
    written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """Approval of a profile's present content."""

    state: State
    """``voided``: the profile was edited after its approval."""
    present_sha256: str
    review: ApprovalRecord | None
    """Last approval or rejection, of the present content or of an earlier one."""


def approval_of(review: ApprovalRecord | None, present_sha256: str) -> Approval:
    """Return the approval of this content.

    A review counts only for the content that it names.
    """
    state: State = "not reviewed"
    if review is not None and review.profile_sha256 == present_sha256:
        state = review.decision
    elif review is not None and review.decision == "approved":
        state = "voided"
    return Approval(state=state, present_sha256=present_sha256, review=review)


def is_sha256(text: str) -> bool:
    """Return whether a text is a SHA-256 as this project writes it."""
    return re.fullmatch(_SHA256, text) is not None


def fill_share(profile: Profile) -> float | None:
    """Return the share of non-padding tokens in a sequence, on average.

    The average is over the dataset; None without a probe.
    """
    tokens = profile.mean_tokens_per_sequence
    return tokens and tokens / profile.train.seq_length_tokens


def updated(
    profile: Profile,
    train: TrainConfig,
    command: str | None = None,
    evidence: Mapping[str, object] | None = None,
    without: Sequence[str] = (),
    **provenance: object,
) -> Profile:
    """Return the profile with other settings and a command's evidence.

    Args:
        profile: Profile to update.
        train: Settings to train with.
        command: Command that measured; None keeps the recorded commands.
        evidence: Its evidence, by the name of the table.
        without: Commands whose evidence is dropped.
        provenance: Fields of the provenance to replace.
    """
    dropped = list(without)
    if train != profile.train:
        # The baseline holds only for the settings that it was measured with.
        dropped.append("baseline")
    commands = [
        name for name in profile.provenance.commands if name not in (*dropped, command)
    ]
    if command is not None:
        commands.append(command)
    new_evidence: dict[str, object] = {**dict.fromkeys(dropped), **(evidence or {})}
    new_provenance = {"commands": commands, **provenance}
    return profile.model_copy(
        update={
            "train": train,
            "provenance": profile.provenance.model_copy(update=new_provenance),
            "evidence": profile.evidence.model_copy(update=new_evidence),
        }
    )
