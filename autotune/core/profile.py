"""The tuned profile: what was decided, under which constraints, on which machine, from which evidence. TOML on disk.

It holds no code, no absolute paths and nothing to execute. The trainer reads ``[train]``, people review the rest.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.errors import BadInput
from trainer.config import PROFILE_SCHEMA_VERSION, TrainConfig
from trainer.errors import BadConfig
from trainer.schema import Table, canonical_sha256, parse_table

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
HASH_KEY = "content_sha256"

_HEADER = (
    "A tuned profile. [train] is what the trainer reads; edit it by hand if you must: the trainer accepts that,",
    "and reports say that content_sha256 no longer holds. Units are in the names; a _share is between 0 and 1.",
)

# Always written, so that a reader sees what was decided; everything else only where it differs from its default.
_ALWAYS_WRITTEN = (
    "seq_length_tokens", "layout", "micro_batch_rows", "global_batch_rows", "precision", "device", "seed",
)  # fmt: skip


class Constraints(Table):
    """What the user set."""

    memory_budget_bytes: Positive
    """Per rank; on CUDA all of a process's device memory, on a CPU what training takes beyond the loaded program."""
    headroom_share: Annotated[float, Field(ge=0, lt=1)]
    """Part of the largest micro-batch that is left free."""
    global_batch_tokens: Positive
    """Real tokens of one optimizer step over all ranks."""


class Fingerprint(Table):
    """Where the figures come from; what may differ there makes them worthless here, in part or in all."""

    device: Literal["cpu", "cuda"]
    gpu_name: str | None = None
    gpu_count: NonNegative = 0
    gpu_total_bytes: Positive | None = None
    gpu_mig: bool | None = None
    gpu_power_cap_w: float | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str
    transformers: str
    python: str
    cpu_model: str | None = None
    allotted_cpus: Positive
    ram_total_bytes: Positive
    data_filesystem: str | None = None
    model_sha256: str
    dataset_hash: str


class Provenance(Table):
    """How the profile came to be."""

    tool_version: str
    created_utc: str
    commands: list[str]
    """Names of the commands that wrote it, oldest first."""
    slurm_job_id: str | None = None
    ledger_sha256: str
    """Over the keys and outcomes of the trials it rests on."""


class CurvePoint(Table):
    """Throughput at one micro-batch."""

    rows: Positive
    slot_tokens_per_s: Annotated[float, Field(gt=0)]
    """All rows full."""
    step_s: Annotated[float, Field(gt=0)]
    """Median of the timed optimizer steps, one micro-batch each."""
    timed_steps: Positive
    slot_tokens_per_s_low: Annotated[float, Field(gt=0)] | None = None
    """95 % confidence bounds; None when a single step shows no spread."""
    slot_tokens_per_s_high: Annotated[float, Field(gt=0)] | None = None


class ProbeEvidence(Table):
    """Which micro-batch fits, and which one is used."""

    feasible_max: Positive
    """The largest micro-batch, in rows, that ran optimizer steps under the budget."""
    infeasible_min: Positive | None = None
    """The smallest that was refused; None when the search met its own upper limit first."""
    feasible_peak_bytes: Positive
    predicted_peak_bytes: Positive | None = None
    """For ``feasible_max``, by the trace as smaller trials corrected it; without a trace by a line through two."""
    traced_peak_bytes: Positive | None = None
    """The same before any trial; None where the model was not traced."""
    traced_rows: NonNegative | None = None
    """The largest micro-batch that the trace alone predicted."""
    traced_terms_bytes: dict[str, int] = Field(default_factory=dict)
    """Where the trace says that the memory of ``feasible_max`` goes."""
    parameters: Positive | None = None
    """Of the model; None where it was not traced."""
    not_traced: str | None = None
    """Why there is no trace."""
    local_ranks: Positive = 1
    """Ranks that took the steps together, each under the budget."""
    micro_batches_per_step: Positive = 1
    """With two, which stand for any number above, gradients exist while the next micro-batch is computed."""
    search_trials: Positive
    """Trials until both sides were proven; the throughput curve took further ones."""
    seconds: Annotated[float, Field(ge=0)]
    """Time of all trials, the curve's included."""
    mean_real_tokens_per_row: Annotated[float, Field(gt=0)]
    curve: list[CurvePoint]
    knee_rows: list[Positive] = Field(default_factory=list)
    """Between which two sizes the knee of the curve lies, for all that the noise tells."""
    choice: str
    """Why ``micro_batch_rows`` is what it is."""


class GpuUse(Table):
    """What the GPUs did in the windows of one count: means over windows and GPUs, shares from 0 to 1."""

    utilisation_share: Share | None = None
    """Time with a kernel running, by NVML; this is not MFU."""
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    power_capped_share: Share | None = None
    """Samples at the power cap: how a loaded card operates."""
    gpm_sm_share: Share | None = None
    gpm_occupancy_share: Share | None = None
    gpm_tensor_share: Share | None = None
    gpm_dram_share: Share | None = None
    gpm_pcie_rx_bytes_per_s: float | None = None


class WorkersRow(Table):
    """What windows with one number of loader workers say."""

    loader_workers: NonNegative
    slot_tokens_per_s: list[float]
    """One figure per window, of all local ranks; padding included, because a step costs the same whatever its rows
    hold."""
    ratio_to_ceiling: Annotated[float, Field(gt=0)]
    """To the same step on batches from memory, windows of the same round against each other."""
    ratio_low: Annotated[float, Field(gt=0)] | None = None
    """98 % confidence bounds of that ratio; None where too few windows show a spread."""
    ratio_high: Annotated[float, Field(gt=0)] | None = None
    verdict: Literal["proven", "refuted", "open"]
    """Whether it is enough."""
    data_wait_share: Share
    """Median; of the time, that devices waited for data, all local ranks' added up."""
    memory_bytes: Positive | None = None
    """Largest; of all local ranks and their workers."""
    storage_bytes_per_s: NonNegativeFloat | None = None
    """Median; read from storage rather than from memory."""
    gpu: GpuUse | None = None
    """None without a GPU."""


class JointChoice(Table):
    """What a search over workers, prefetching and pinning together found, where workers alone left a gap."""

    trials: Positive
    loader_workers: NonNegative
    prefetch_batches: Positive
    pin_memory: bool
    ratio_to_workers_alone: Annotated[float, Field(gt=0)]
    ratio_low: Annotated[float, Field(gt=0)] | None = None
    ratio_high: Annotated[float, Field(gt=0)] | None = None
    adopted: bool
    """Whether it was proven to be faster, and is what the profile says."""


class WorkersEvidence(Table):
    """How many loader workers are enough."""

    chosen: NonNegative
    undecided_between: list[NonNegative] = Field(default_factory=list)
    """The fewest and the most that it may be; empty when it is decided."""
    choice: str
    refusal: str | None = None
    """What is known of the next smaller count that was measured."""
    fed: bool
    """Whether the chosen count keeps the step fed."""
    ceiling_slot_tokens_per_s: list[float]
    """The same step on batches that already lie in memory."""
    rows: list[WorkersRow]
    joint: JointChoice | None = None
    local_ranks: Positive
    max_workers: NonNegative
    max_workers_because: str
    consumer: str
    """What took the batches: the training step, or a replay of one."""
    window_s: Annotated[float, Field(gt=0)]
    windows: Positive
    seconds: Annotated[float, Field(ge=0)]
    page_cache: Literal["warm", "cold", "as_is"]
    """Whether the dataset was read into memory first, or put out of it, or neither."""
    page_cache_share: Share | None = None
    """Median part of the dataset that lay in memory before a window."""
    data_filesystem: str | None = None
    """The type of the file system that the data lies on."""
    data_on_network: bool = False
    """Whether that is another machine's, and others use it too."""
    gpu_source: str
    """Where the GPU's figures come from, or why there are none."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step is fed from memory."""


class Evidence(Table):
    """What was measured; a missing part was not."""

    probe: ProbeEvidence | None = None
    workers: WorkersEvidence | None = None


class Profile(Table):
    """All tables but the content hash, which is computed from them."""

    schema_version: Literal[1] = PROFILE_SCHEMA_VERSION
    train: TrainConfig
    constraints: Constraints
    fingerprint: Fingerprint
    provenance: Provenance
    evidence: Evidence


def profile_to_toml(profile: Profile) -> str:
    """The profile as text, with its content hash last."""
    import tomlkit

    tables = _tables(profile)
    document = tomlkit.document()
    for line in _HEADER:
        document.add(tomlkit.comment(line))
    for name, value in (tables | {HASH_KEY: canonical_sha256(tables)}).items():
        if not isinstance(value, dict):  # plain values stand before the first table
            document.add(name, value)
    for name, value in tables.items():
        if isinstance(value, dict):
            document.add(name, value)
    return tomlkit.dumps(document)


def profile_from_tables(tables: dict[str, Any], *, where: str) -> tuple[Profile, bool]:
    """Validate what a TOML file held.

    Args:
        tables: The parsed file.
        where: Its name in messages.

    Returns:
        The profile, and whether its content still has the hash it was written with.

    Raises:
        BadInput: If a key is unknown (the nearest valid one is suggested), missing, or of a wrong value.
    """
    content = {key: value for key, value in tables.items() if key != HASH_KEY}
    try:
        profile = parse_table(Profile, content, where=where)
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error
    return profile, tables.get(HASH_KEY) == canonical_sha256(content)


def _tables(profile: Profile) -> dict[str, Any]:
    tables: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    short = profile.train.model_dump(mode="json", exclude_defaults=True)
    tables["train"] = {name: tables["train"][name] for name in _ALWAYS_WRITTEN} | short
    if profile.evidence.workers is not None:  # decided, even where the decision is the default
        short.setdefault("data", {})["loader_workers"] = profile.train.data.loader_workers
    return tables
