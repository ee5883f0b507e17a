"""The trainer's settings: one schema, declared once; also the ``[train]`` table of a profile. No torch here."""

import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.tables import StrictTable

PROFILE_SCHEMA_VERSION: Literal[2] = 2

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Precision = Literal["fp32", "bf16"]
Layout = Literal["padded", "dynamic", "bucketed", "packed"]
TRIMMED_LAYOUTS: tuple[Layout, ...] = ("dynamic", "bucketed")
"""Those whose micro-batches are as wide as the longest sample in them."""
Schedule = Literal["constant", "linear", "cosine", "wsd"]
Strategy = Literal["ddp", "zero1", "fsdp2"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
Attention = Literal["auto", "varlen", "sdpa"]
Head = Literal["sparse", "dense"]
LastLayer = Literal["sparse", "dense"]
Checkpointing = Literal["none", "selective", "full"]
Policy = Literal["warn", "skip", "rollback"]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Tag(enum.Enum):
    """Groups of settings; ``tagged`` names the members of a group."""

    SPEED = enum.auto()
    """How a step computes: what recipes for the same training differ in."""
    PROBED = enum.auto()
    """What a probed micro-batch holds for."""
    LOADER = enum.auto()
    """How data is loaded."""


class ModelSettings(StrictTable):
    """The model to build from scratch."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Becomes part of file names, so it can hold nothing that leads elsewhere."""
    config: dict[str, Any]
    """A transformers config as a table: ``model_type`` and what differs from that type's defaults, no vocabulary."""
    null_keys: list[str] = Field(default_factory=list)
    """Keys of the config whose value is null, which TOML cannot write."""

    @field_validator("config")
    @classmethod
    def _names_its_type(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("model_type"), str):
            raise ValueError("must have a model_type, such as 'bert'")
        return config


class DataSettings(StrictTable):
    """Which dataset, and how it is read."""

    path: str | None = None
    """Relative to the profile; ``--data`` and ``AUTOTUNE_DATA`` come first. Never absolute inside a profile."""
    dataset_hash: str | None = None
    """The dataset the profile was tuned on; another one is refused."""
    num_workers: Annotated[NonNegative, Tag.LOADER] = 0
    """Loader processes per rank; 0 loads in the training process."""
    prefetch_factor: Annotated[Positive, Tag.LOADER] = 2
    """Micro-batches each loader process holds ready; without such processes nothing is."""
    pin_memory: Annotated[bool, Tag.LOADER] = True
    """Page-locked host memory, where there is a GPU."""
    stage_to: str | None = None
    """A directory on every node's own disk to copy the dataset to before training, such as ``$TMPDIR``; environment
    variables are filled in. One rank of a node copies, the others wait; what is there already is not copied again."""


class ParallelSettings(StrictTable):
    """How ranks work together."""

    strategy: Strategy = "ddp"
    """What each rank holds. ``ddp``: all of it. ``zero1``: all weights and gradients, its share of the optimizer's
    state. ``fsdp2``: its share of everything, gathered layer by layer."""
    shard_ranks: Positive | None = None
    """With ``fsdp2``: how many neighbouring ranks share one copy of the model (HSDP), such as those of a node; all of
    them when absent."""
    bucket_cap_mib: Positive = 25
    """DDP's (and zero1's; fsdp2 has none) gradient bucket size: larger ones for slow networks and many nodes."""
    gradient_as_bucket_view: bool = True
    """Gradients live in DDP's buckets; otherwise every gradient exists twice."""
    static_graph: bool = False
    """Tells DDP that every step uses the same parameters in the same order, which these models do."""
    gradient_dtype: GradientDtype = "fp32"
    """What gradients travel as. 16 bits halve the traffic and change the recipe."""
    timeout_s: Annotated[float, Field(ge=1, le=7 * 86400)] = 600.0
    """A rank that has not taken a step for so long is dead or hung, and the job ends. Compiling layers, and a save that
    makes no progress, count as well, so it must be longer than these."""


class EvaluationSettings(StrictTable):
    """How the model is held against the validation split, with the same masks every time."""

    interval_steps: Positive | None = None
    """Also during training; at its end in any case."""
    max_sequences: Positive = 2048
    """Rows of validation samples, over all ranks; the first ones of a seeded order."""


class CheckpointSettings(StrictTable):
    """When the whole state of training is saved, and how much of it is kept."""

    enabled: bool = True
    """Whether anything is saved before the end."""
    interval_s: PositiveFloat = 600.0
    """Longest time between two checkpoints; what a killed run loses at most."""
    interval_steps: Positive | None = None
    """Also after every so many optimizer steps."""
    keep_last: Positive = 2
    """Newest ones that stay, beside the newest that a rollback would take."""
    keep_every_steps: Positive | None = None
    """Those of steps that are multiples of this stay for good."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in host memory."""


class HealthSettings(StrictTable):
    """What counts as trouble in loss and gradient, and what is done about it.

    ``warn`` tells and goes on. ``skip`` leaves the weights as they are for that batch. ``rollback`` returns to the last
    good checkpoint, leaves out the data since then, and eases the learning rate.
    """

    on_non_finite: Literal["skip", "rollback"] = "skip"
    """When loss or gradient are not finite. Such a step is never applied, whatever is said here."""
    on_spike: Policy = "warn"
    """When the loss lies far above those before it."""
    on_explosion: Policy = "warn"
    """When the gradient's norm lies far above the clip and above those before it."""
    window_steps: Annotated[int, Field(ge=8)] = 128
    """Steps that a loss or a norm is held against."""
    spike_sigmas: PositiveFloat = 8.0
    """How many robust standard deviations above the median of the window are a spike or an explosion."""
    explosion_ratio: PositiveFloat = 10.0
    """How many times ``max_grad_norm`` a norm must be to be an explosion."""
    plateau_window_steps: Annotated[int, Field(ge=20)] = 2000
    """The loss stands still when the second half of so many steps is not lower than the first."""
    patience_steps: Positive = 5
    """After so many skipped steps in a row skipping does not help, and training rolls back."""
    max_rollbacks: NonNegative = 3
    """After so many without progress training gives up."""
    eased_learning_rate_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the learning rate that is left after a rollback, and again after each further one."""
    easing_steps: Positive = 200
    """Steps in which it comes back; training that gets so far past the trouble has made progress."""


class TrainConfig(StrictTable):
    """Everything the trainer needs, and nothing about how it was found."""

    model: ModelSettings
    data: DataSettings = DataSettings()
    parallel: ParallelSettings = ParallelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: HealthSettings = HealthSettings()
    seq_length_tokens: Annotated[int, Field(ge=8), Tag.PROBED] = 512
    """Tokens in a row, special tokens included; longer samples are cut."""
    layout: Annotated[Layout, Tag.SPEED, Tag.PROBED] = "padded"
    """What a row holds. ``padded``: one sample, then padding. ``dynamic``: the same, in micro-batches as wide as their
    longest sample. ``bucketed``: also, rows of an optimizer step that are alike in length are computed together.
    ``packed``: as many samples as fit; none attends to another."""
    micro_batch_size: Annotated[Positive, Tag.SPEED] = 8
    """Rows that one rank computes at once."""
    global_batch_size: Positive = 256
    """Rows of one optimizer step over all ranks, exact at any number of ranks (the default is BERT's)."""
    global_batch_tokens: Positive | None = None
    """The same in real tokens, which then decides: as many rows as hold so many in the mean of this dataset."""
    global_batch_samples: Positive | None = None
    """The same in samples."""
    max_steps: Positive = 1000
    """Optimizer steps of the run."""
    max_epochs: Positive | None = None
    """Ends the run sooner, when every sample was seen so often; the learning rate still follows ``max_steps``."""
    stop_after_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Time from the start of the process by which the state is saved and the run has ended, to be started again. Under
    SLURM the job's own end counts as well."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """The schedule's peak (the default is that of Devlin et al. 2018)."""
    schedule: Schedule = "linear"
    """After the warm-up. ``linear`` and ``cosine`` fall to the final rate by ``max_steps``; ``wsd`` stays at the peak
    and falls over the last part only; ``constant`` stays."""
    warmup_steps: NonNegative = 100
    """Steps in which the learning rate rises linearly."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """With ``wsd``: the part of ``max_steps`` that the fall takes."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the peak at the end."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """On matrices only: biases and normalisation weights are left alone."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the mean of their squares."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of that mean."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients whose norm, of all together, is larger are scaled down to it."""
    masking_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of ordinary tokens to predict; of these 80 % become [MASK], 10 % a random token, 10 % stay."""
    attention: Annotated[Attention, Tag.SPEED] = "auto"
    """``varlen`` computes each sample on its own (GPUs from Ampere on, bf16, no attention dropout), ``sdpa`` whole rows
    under a mask. ``auto`` takes varlen where it can, and the run says which, and why."""
    attention_dropout: Annotated[float | None, Field(ge=0, lt=1), Tag.SPEED, Tag.PROBED] = None
    """Instead of the model's. Another value is a change of recipe, and is named in the run record."""
    mlm_head: Annotated[Head, Tag.SPEED] = "sparse"
    """Which positions the prediction head computes: those to predict, or with ``dense`` all. The loss is the same."""
    last_layer: Annotated[LastLayer, Tag.SPEED] = "sparse"
    """Which positions the last layer computes, beside keys and values: with a ``sparse`` MLM head, those to predict are
    enough, and the loss is the same."""
    activation_checkpointing: Annotated[Checkpointing, Tag.SPEED, Tag.PROBED] = "none"
    """Which activations are computed again in backward instead of kept. ``selective`` keeps the results of matrix
    products and attention, ``full`` keeps only what enters a layer."""
    compile: Annotated[bool, Tag.SPEED] = False
    """Compile each layer with ``torch.compile``: minutes at the start, faster steps after."""
    precision: Annotated[Precision, Tag.SPEED, Tag.PROBED] = "fp32"
    """Of the matrix products; weights and the optimizer stay in fp32. ``bf16`` is autocast."""
    tf32: Annotated[bool, Tag.SPEED] = True
    """With ``fp32`` on GPUs from Ampere on, multiply in TF32, which rounds factors to 10 bits."""
    device: Annotated[Literal["cpu", "cuda"], Tag.PROBED] = "cpu"
    """What it trains on."""
    seed: NonNegative = 0
    """Of weights, order of samples, masks and dropout."""
    log_interval_steps: Positive = 1
    """A row of the record for every so many steps."""

    @field_validator("precision", mode="before")
    @classmethod
    def _fp16_is_refused(cls, value: object) -> object:
        if value == "fp16":
            raise ValueError(
                "fp16 is not offered: its gradients overflow and need loss scaling, which skips steps and makes runs "
                "irreproducible; use bf16 on GPUs from Ampere on, fp32 elsewhere"
            )
        return value

    @model_validator(mode="after")
    def _settings_go_together(self) -> "TrainConfig":
        parallel, sharded = self.parallel, self.parallel.strategy == "fsdp2"
        if self.global_batch_tokens is not None and self.global_batch_samples is not None:
            raise ValueError("global_batch_tokens and global_batch_samples cannot both decide; give one of them")
        if parallel.shard_ranks is not None and not sharded:
            raise ValueError("parallel.shard_ranks needs parallel.strategy = 'fsdp2'")
        if parallel.static_graph and sharded:
            raise ValueError("parallel.static_graph is DDP's, which parallel.strategy = 'fsdp2' does not use")
        if self.data.path is not None and Path(self.data.path).is_absolute():
            raise ValueError("data.path must be relative to the profile; give absolute places with --data")
        return self


class BatchSplit(StrictTable):
    """How the rows of a global batch become the micro-batches of ranks."""

    layout: Layout
    global_batch_size: Positive
    gradient_accumulation_steps: Positive
    world_size: Positive

    @property
    def sequences_per_micro_batch(self) -> int:
        """The even share, at most the configured micro-batch; the number of rows of every micro-batch."""
        return -(-self.global_batch_size // (self.world_size * self.gradient_accumulation_steps))


def gradient_accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-batches per optimizer step on each rank so that ``global_batch_size`` is kept exactly."""
    return math.ceil(config.global_batch_size / (config.micro_batch_size * world_size))


def tagged(table: type[StrictTable], tag: Tag) -> tuple[str, ...]:
    """Return the names of a group of settings, in the order of their declaration."""
    return tuple(name for name, known in table.model_fields.items() if tag in known.metadata)


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted key; the model's own config is one value: its keys belong to transformers."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and name != "config":
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
