"""Schema of the trainer's settings, which is also the ``[train]`` table of a profile. No torch here."""

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
"""Layouts whose micro-batches are only as wide as their longest sample."""
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
    """Settings that decide how fast a step is computed; recipes for the same training differ in these."""
    PROBED = enum.auto()
    """Settings that a probed micro-batch size depends on."""
    LOADER = enum.auto()
    """Settings of data loading."""


class ModelSettings(StrictTable):
    """Model to pretrain from scratch."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Name of the model, part of file names: letters, digits, ``.``, ``_`` and ``-`` only."""
    config: dict[str, Any]
    """Config in transformers' keys: ``model_type`` and all that differs from its defaults, but no vocabulary size."""
    null_keys: list[str] = Field(default_factory=list)
    """Keys of ``config`` whose value is null, which TOML cannot express."""

    @field_validator("config")
    @classmethod
    def _names_its_type(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("model_type"), str):
            raise ValueError("must have a model_type, such as 'bert'")
        return config


class DataSettings(StrictTable):
    """Dataset and data loading."""

    path: str | None = None
    """Dataset directory, relative to the profile (never absolute); ``--data`` and ``AUTOTUNE_DATA`` override it."""
    dataset_hash: str | None = None
    """Hash of the dataset that the profile was tuned on; training rejects any other dataset."""
    num_workers: Annotated[NonNegative, Tag.LOADER] = 0
    """DataLoader workers per rank; 0 loads in the training process."""
    prefetch_factor: Annotated[Positive, Tag.LOADER] = 2
    """Micro-batches that each DataLoader worker prefetches; without workers there is no prefetching."""
    pin_memory: Annotated[bool, Tag.LOADER] = True
    """Load into page-locked (pinned) host memory, for asynchronous copies to the GPU; no effect on a CPU."""
    stage_to: str | None = None
    """Directory on each node's local disk to copy the dataset to before training, such as ``$TMPDIR``; environment
    variables are expanded. One rank per node copies while the others wait; an intact copy is reused."""


class ParallelSettings(StrictTable):
    """Parallel strategy and gradient synchronisation."""

    strategy: Strategy = "ddp"
    """Parallel strategy. ``ddp`` replicates weights, gradients and optimizer state on every rank, ``zero1`` shards the
    optimizer state, ``fsdp2`` shards all three and gathers weights layer by layer."""
    shard_ranks: Positive | None = None
    """Neighbouring ranks that share one copy of the model with ``fsdp2`` (HSDP), such as those of a node; all ranks
    when absent."""
    bucket_cap_mib: Positive = 25
    """Size of DDP's gradient buckets (``ddp`` and ``zero1``), in MiB; larger ones suit slow networks and many nodes."""
    gradient_as_bucket_view: bool = True
    """Keep gradients in DDP's buckets; otherwise every gradient is stored twice."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters in the same order, which is true of these models."""
    gradient_dtype: GradientDtype = "fp32"
    """Number format of gradients while they are synchronised; 16 bits halve the traffic and change the recipe."""
    timeout_s: Annotated[float, Field(ge=1, le=7 * 86400)] = 600.0
    """Longest time without progress on a rank, in seconds, before the job ends as hung. Must exceed the time to compile
    layers and the longest stall of a checkpoint write."""


class EvaluationSettings(StrictTable):
    """Evaluation on the validation split, with the same sequences and masks every time."""

    interval_steps: Positive | None = None
    """Optimizer steps between evaluations during training; there is always one at the end."""
    max_sequences: Positive = 2048
    """Most sequences to evaluate, over all ranks: the first ones of the validation split in a seeded order."""


class CheckpointSettings(StrictTable):
    """Checkpoints of the training state: when they are written, and which are kept."""

    enabled: bool = True
    """Write checkpoints; without them, a run saves only the final model and cannot be resumed."""
    interval_s: PositiveFloat = 600.0
    """Longest time between the starts of two checkpoints, in seconds: about what a killed run loses."""
    interval_steps: Positive | None = None
    """Optimizer steps between further checkpoints, in addition to those by time."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep; the newest good one, for rollbacks, is always kept too."""
    keep_every_steps: Positive | None = None
    """Optimizer steps between checkpoints that are kept for good."""
    asynchronous: bool = True
    """Write checkpoints while training continues, from a copy of the state in host memory."""


class HealthSettings(StrictTable):
    """Detection of problems in loss and gradient norm, and the response to them.

    ``warn`` reports and continues. ``skip`` leaves out the update of that step. ``rollback`` returns to the last good
    checkpoint, skips the data since then, and lowers the learning rate for a while.
    """

    on_non_finite: Literal["skip", "rollback"] = "skip"
    """Response to a loss or gradient norm that is NaN or infinite; such a step is never applied."""
    on_spike: Policy = "warn"
    """Response to a loss far above the previous ones."""
    on_explosion: Policy = "warn"
    """Response to a gradient norm far above both the previous ones and ``max_grad_norm``."""
    window_steps: Annotated[int, Field(ge=8)] = 128
    """Number of previous steps that a loss or gradient norm is compared with."""
    spike_sigmas: PositiveFloat = 8.0
    """Spike and explosion threshold: robust standard deviations above the window's median, at least 10 % above it."""
    explosion_ratio: PositiveFloat = 10.0
    """Multiple of ``max_grad_norm`` that a gradient norm must also exceed to be an explosion."""
    plateau_window_steps: Annotated[int, Field(ge=20)] = 2000
    """Shortest window for plateaus, in steps: the loss of its second half is not clearly below that of its first."""
    patience_steps: Positive = 5
    """Skipped steps in a row after which training rolls back instead."""
    max_rollbacks: NonNegative = 3
    """Rollbacks without progress that are allowed before training gives up, with exit code 76."""
    eased_learning_rate_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rate after a rollback, applied again for each further one without progress."""
    easing_steps: Positive = 200
    """Steps in which the learning rate returns to its schedule; a run that far past the problem has made progress."""


class TrainConfig(StrictTable):
    """Settings of the trainer; ``--set train.KEY=VALUE`` overrides one for a run."""

    model: ModelSettings
    data: DataSettings = DataSettings()
    parallel: ParallelSettings = ParallelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    health: HealthSettings = HealthSettings()
    seq_length_tokens: Annotated[int, Field(ge=8), Tag.PROBED] = 512
    """Tokens per sequence, special tokens included; longer samples are truncated."""
    layout: Annotated[Layout, Tag.SPEED, Tag.PROBED] = "padded"
    """Arrangement of samples in sequences. ``padded``: one sample, padded to the full length. ``dynamic``: one sample,
    padded to the longest of its micro-batch. ``bucketed``: ``dynamic`` with micro-batches of samples of similar length.
    ``packed``: as many samples as fit, with no cross-document attention."""
    micro_batch_size: Annotated[Positive, Tag.SPEED] = 8
    """Sequences per micro-batch on each rank."""
    global_batch_size: Positive = 256
    """Sequences per optimizer step over all ranks, exact at any number of ranks (the default is BERT's)."""
    global_batch_tokens: Positive | None = None
    """Global batch in non-padding tokens, converted to sequences by their mean; overrides ``global_batch_size``."""
    global_batch_samples: Positive | None = None
    """Global batch in samples, converted in the same way; cannot be used with ``global_batch_tokens``."""
    max_steps: Positive = 1000
    """Optimizer steps of the run."""
    max_epochs: Positive | None = None
    """Passes over the dataset after which the run ends early; the learning rate still follows ``max_steps``."""
    stop_after_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Time limit from the start of the process, in seconds, by which the run saves its state and exits with code 75, to
    be resumed. Under SLURM the job's time limit applies as well."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate (the default is that of Devlin et al. 2018)."""
    schedule: Schedule = "linear"
    """Learning-rate schedule after warm-up. ``linear`` and ``cosine`` decay to the final rate by ``max_steps``, ``wsd``
    (warm-up, stable, decay) decays in the last part only, ``constant`` stays at the peak."""
    warmup_steps: NonNegative = 100
    """Optimizer steps of linear learning-rate warm-up."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of ``max_steps`` in which ``wsd`` decays."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a fraction of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of AdamW, applied to matrices only, not to biases and normalisation weights."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment, the mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of AdamW's second moment, the mean of squared gradients."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term that AdamW adds to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clipping threshold: largest L2 norm of all gradients together."""
    masking_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of ordinary tokens to predict; of these, 80 % become [MASK], 10 % a random token, 10 % stay."""
    attention: Annotated[Attention, Tag.SPEED] = "auto"
    """Attention kernel. ``varlen`` computes each sample on its own (GPUs from Ampere on, bf16, no attention dropout),
    ``sdpa`` whole sequences under a mask; ``auto`` takes ``varlen`` if it can, and the run reports its choice."""
    attention_dropout: Annotated[float | None, Field(ge=0, lt=1), Tag.SPEED, Tag.PROBED] = None
    """Dropout of attention weights, if not the model's own: a change of recipe, which the run record lists."""
    mlm_head: Annotated[Head, Tag.SPEED] = "sparse"
    """Positions that the MLM head computes: ``sparse``, those to predict, or ``dense``, all. The loss is the same."""
    last_layer: Annotated[LastLayer, Tag.SPEED] = "sparse"
    """Positions that the last layer computes, apart from keys and values: ``sparse``, those to predict, or ``dense``,
    all. The loss is the same; ``sparse`` takes effect only with a sparse MLM head."""
    activation_checkpointing: Annotated[Checkpointing, Tag.SPEED, Tag.PROBED] = "none"
    """Activation checkpointing, which trades speed for memory. ``selective`` keeps results of matmuls and attention,
    ``full`` only the input of each layer."""
    compile: Annotated[bool, Tag.SPEED] = False
    """Compile each layer with ``torch.compile``: minutes at the start, faster steps afterwards."""
    precision: Annotated[Precision, Tag.SPEED, Tag.PROBED] = "fp32"
    """Precision of matmuls; weights and optimizer state stay in fp32. ``bf16`` is autocast."""
    tf32: Annotated[bool, Tag.SPEED] = True
    """Compute ``fp32`` matmuls in TF32 on GPUs from Ampere on, with inputs rounded to 10 mantissa bits."""
    device: Annotated[Literal["cpu", "cuda"], Tag.PROBED] = "cpu"
    """Device to train on."""
    seed: NonNegative = 0
    """Seed of initial weights, sample order, masks and dropout."""
    log_interval_steps: Positive = 1
    """Optimizer steps between logged metrics, in ``steps.jsonl``, TensorBoard and the console."""

    @field_validator("precision", mode="before")
    @classmethod
    def _reject_fp16(cls, value: object) -> object:
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
    """Batch split: the division of a global batch into micro-batches of ranks."""

    layout: Layout
    global_batch_size: Positive
    gradient_accumulation_steps: Positive
    world_size: Positive

    @property
    def sequences_per_micro_batch(self) -> int:
        """Sequences of every micro-batch: the even share, at most the configured micro-batch size."""
        return -(-self.global_batch_size // (self.world_size * self.gradient_accumulation_steps))


def gradient_accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Return the micro-batches per optimizer step and rank that keep ``global_batch_size`` exact."""
    return math.ceil(config.global_batch_size / (config.micro_batch_size * world_size))


def tagged(table: type[StrictTable], tag: Tag) -> tuple[str, ...]:
    """Return the names of a group of settings, in the order of their declaration."""
    return tuple(name for name, known in table.model_fields.items() if tag in known.metadata)


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every setting by its dotted key; the model's config is one value, as its keys belong to transformers."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and name != "config":
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
