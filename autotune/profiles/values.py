"""The tuned profile: what was decided, under which constraints, on which machine, from which evidence. TOML on disk."""

from collections.abc import Mapping
from trainer.config.train_config import TrainConfig
from collections.abc import Mapping
from collections.abc import Sequence
from trainer.config.train_config import TrainConfig



import re
import shlex
from dataclasses import dataclass
from typing import Annotated
from typing import Literal
from pydantic import Field
from autotune.errors import NotCheckable
from autotune.errors import ProfileRejected
from trainer.config.tables import StrictTable

from autotune.baseline.values import BaselineEvidence
from autotune.network.values import NetworkEvidence
from autotune.workers.values import WorkersEvidence
from autotune.memory.values import ProbeEvidence
from autotune.search.values import ExploreEvidence
from trainer.config.tables import StrictTable

from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.base.interval import NonNegative, Positive
from autotune.errors import BadInput
from autotune.machine.values import is_pretended
from trainer.config.train_config import PROFILE_SCHEMA_VERSION, ModelSettings, TrainConfig
from trainer.errors import BadConfig
from trainer.config.tables import StrictTable, canonical_sha256, parse_table

class Evidence(StrictTable):
    """What was measured; a missing part was not."""

    probe: ProbeEvidence | None = None
    explore: ExploreEvidence | None = None
    workers: WorkersEvidence | None = None
    network: NetworkEvidence | None = None
    baseline: BaselineEvidence | None = None


HASH_KEY = "content_sha256"

_HEADER = (
    "A tuned profile. [train] is what the trainer reads; edit it by hand if you must: the trainer accepts that,",
    "and reports say that content_sha256 no longer holds. Units are in the names; a _share is between 0 and 1.",
)

# Always written, so that a reader sees what was decided; everything else only where it differs from its default.
_ALWAYS_WRITTEN = (
    "seq_length_tokens", "layout", "micro_batch_size", "global_batch_size", "precision", "device", "seed",
)  # fmt: skip


class Constraints(StrictTable):
    """What the user set."""

    memory_budget_bytes: Positive
    """Per rank; on CUDA all of a process's device memory, on a CPU what training takes beyond the loaded program."""
    headroom_share: Annotated[float, Field(ge=0, lt=1)]
    """Part of the largest micro-batch that is left free."""
    global_batch_tokens: Positive
    """Real tokens of one optimizer step over all ranks."""


class Fingerprint(StrictTable):
    """Where the figures come from; what may differ there makes them worthless here, in part or in all."""

    device: Literal["cpu", "cuda"]
    """What was measured."""
    gpu_name: str | None = None
    """As the driver says it."""
    gpu_count: NonNegative
    """Visible ones; 0 on a CPU."""
    gpu_total_bytes: Positive | None = None
    """Memory of one."""
    gpu_mig: bool | None = None
    """Whether it is a part of a GPU."""
    gpu_power_cap_w: float | None = None
    """Power that the card may draw."""
    driver: str | None = None
    """Version of the GPU's driver."""
    cuda: str | None = None
    """Version that torch was built for."""
    torch: str
    """Its version."""
    transformers: str
    """Its version."""
    python: str
    """Its version."""
    cpu_model: str | None = None
    """The processor's name."""
    allotted_cpus: Positive
    """Processors that the process may use: the least of affinity, control group and SLURM."""
    ram_total_bytes: Positive
    """Of the host."""
    data_filesystem: str | None = None
    """Type of the file system that the dataset lies on."""
    model_sha256: str
    """Of the model's config."""
    dataset_hash: str
    """Of the dataset's manifest."""

    @property
    def bytes_known(self) -> Literal["measured", "allocator"]:
        """How sizes in bytes came about: ``allocator`` on a pretended GPU, where torch's allocator alone is real."""
        return "allocator" if is_pretended(self.driver) else "measured"


class Provenance(StrictTable):
    """How the profile came to be."""

    tool_version: str
    """Of this program."""
    created_utc: str
    """When the profile was written."""
    commands: list[str]
    """Names of the commands that wrote it, oldest first. Free text in a profile of a stranger: shown, and never
    suggested to anybody as something to run."""
    slurm_job_id: str | None = None
    """The job that measured; None outside of one."""
    trial_log_sha256: str
    """Over all that the trial log says of the trials of this model, dataset, device and length of rows."""
    trial_log_until_utc: str | None = None
    """Time of the last one of them; None where there was none, and in profiles from before this was kept, whose hash
    cannot be recomputed."""


class Profile(StrictTable):
    """All tables but the content hash, which is computed from them."""

    schema_version: Literal[2] = PROFILE_SCHEMA_VERSION
    train: TrainConfig
    constraints: Constraints
    fingerprint: Fingerprint
    provenance: Provenance
    evidence: Evidence

    @property
    def local_ranks(self) -> int:
        """Ranks of a node that trained together when it was probed; one without a probe."""
        return 1 if self.evidence.probe is None else self.evidence.probe.local_ranks

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, as a trace counted them; None without one."""
        return None if self.evidence.probe is None else self.evidence.probe.parameters

    @property
    def mean_tokens_per_sequence(self) -> float | None:
        """Non-padding tokens of a row in this layout, on average; None without a probe."""
        return None if self.evidence.probe is None else self.evidence.probe.mean_tokens_per_sequence


def model_sha256(settings: ModelSettings) -> str:
    """Names a model, whatever it is called."""
    return canonical_sha256(settings.model_dump(mode="json", exclude={"name"}))


def profile_to_toml(profile: Profile) -> str:
    """The profile as text, with its content hash last."""
    import tomlkit

    tables = _tables(profile)
    document = tomlkit.document()
    for line in _HEADER:
        document.add(tomlkit.comment(line))
    hashed = tables | {HASH_KEY: canonical_sha256(tables)}
    for name, value in sorted(hashed.items(), key=lambda one: isinstance(one[1], dict)):  # plain values come first
        document.add(name, value)
    return tomlkit.dumps(document)


def profile_from_tables(tables: dict[str, Any], *, where: str) -> tuple[Profile, bool]:
    """Return the profile that a TOML file holds, and whether its content still has the hash it was written with.

    Raises:
        BadInput: If a key is unknown (the nearest valid one is suggested), missing, or of a wrong value.
    """
    content = {key: value for key, value in tables.items() if key != HASH_KEY}
    try:
        profile = parse_table(Profile, content, where=where)
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error
    return profile, tables.get(HASH_KEY) == present_sha256(tables, where=where)


def present_sha256(tables: dict[str, Any], *, where: str) -> str:
    """The hash of what a profile's tables say now, whatever hash the file names.

    Raises:
        BadInput: If a value has no canonical form.
    """
    try:
        return canonical_sha256({key: value for key, value in tables.items() if key != HASH_KEY})
    except (TypeError, ValueError) as error:  # a date, or a number that is none
        raise BadInput(
            f"{where} holds a value that no profile has: {error}",
            next_step="Write numbers, texts, lists and tables only.",
        ) from error


def _tables(profile: Profile) -> dict[str, Any]:
    tables: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    short = profile.train.model_dump(mode="json", exclude_defaults=True)
    if profile.evidence.workers is not None:  # decided, even where the decision is the default
        short.setdefault("data", {})["num_workers"] = profile.train.data.num_workers
    tables["train"] = {name: tables["train"][name] for name in _ALWAYS_WRITTEN} | short
    return tables


Found = Literal["same", "refuse", "warn", "inform", "not checkable here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a profile says, held against what is here."""

    field: str
    found: Found
    """``same``, or how much it matters that it differs, or that nobody here can tell."""
    profile: str
    here: str
    """Or why nobody here can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLogCheck:
    """What the trial log beside a profile says of it."""

    found: Literal["same", "differs", "not recomputable", "no trials"]
    """Whether the trials it rests on are what they were when it was written: all of them, none changed, none added.
    ``not recomputable``: the profile does not say up to when they count. ``no trials``: none of it are here."""
    trials: int
    """Of the profile's model, dataset and rows, up to when it was written."""
    added: int
    others: int
    """Trials in the same trial log that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that no trial gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile."""

    checks: tuple[Check, ...]
    trial_log: TrialLogCheck | None = None
    """None where nobody looked."""

    def of(self, found: Found) -> tuple[Check, ...]:
        """Those with such a result."""
        return tuple(check for check in self.checks if check.found == found)

    def raise_if_bad(self, name: str) -> None:
        """Say the worst as an error.

        Raises:
            ProfileRejected: If something differs that the figures cannot bear.
            NotCheckable: If nothing does, and something cannot be told here.
        """
        if refused := self.of("refuse"):
            told = "; ".join(f"{check.field} was {check.profile!r}, here it is {check.here!r}" for check in refused)
            raise ProfileRejected(
                f"{name} does not belong here: {told}",
                next_step="Tune for what is here: autotune tune; or use the profile where it was made.",
            )
        if unknown := self.of("not checkable here"):
            raise NotCheckable(
                f"not checkable here: {', '.join(check.field for check in unknown)}",
                next_step="Run it where the profile is for, and its dataset is: "
                + shlex.join(["autotune", "profile", "verify", name]),
            )


_SHA256 = r"^[0-9a-f]{64}$"


Verdict = Literal["approved", "rejected"]


State = Literal["not reviewed", "approved", "rejected", "voided"]


class ApprovalRecord(StrictTable):
    """``review.json``: the last verdict. The name is a word: nothing here proves who wrote it."""

    schema_version: Literal[2] = 2
    profile_sha256: Annotated[str, Field(pattern=_SHA256)]
    """Of the content that was looked at."""
    verdict: Verdict
    by: Annotated[str, Field(min_length=1, max_length=200)]
    note: Annotated[str, Field(max_length=2000)] | None = None
    time_utc: Annotated[str, Field(max_length=40)]
    as_edited: bool = False
    """Whether the content had been changed by hand since it was written, and was approved all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """How a profile stands, as it is now."""

    state: State
    """``voided``: what was approved last is not what the profile says now."""
    present_sha256: str
    review: ApprovalRecord | None
    """The verdict on that, or on what it said before."""


def approval_of(review: ApprovalRecord | None, present_sha256: str) -> Approval:
    """How a profile of this content stands: a verdict counts for just the content that it was given on."""
    state: State = "not reviewed"
    if review is not None and review.profile_sha256 == present_sha256:
        state = review.verdict
    elif review is not None and review.verdict == "approved":
        state = "voided"
    return Approval(state=state, present_sha256=present_sha256, review=review)


def is_sha256(text: str) -> bool:
    """Whether a text is a hash as this project writes it."""
    return re.fullmatch(_SHA256, text) is not None


def fill_share(profile: Profile) -> float | None:
    """Real tokens of a row over its places, in the mean of the dataset; None where it was not probed."""
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
    """The profile with these settings and this evidence of a command, and without what some commands found."""
    # What the settings were worth is no longer said of others.
    gone = [*without, *(["baseline"] if train != profile.train else [])]
    commands = [name for name in profile.provenance.commands if name not in (*gone, command)]
    said = {"commands": commands if command is None else [*commands, command], **provenance}
    return profile.model_copy(
        update={
            "train": train,
            "provenance": profile.provenance.model_copy(update=said),
            "evidence": profile.evidence.model_copy(update={**dict.fromkeys(gone), **(evidence or {})}),
        }
    )
