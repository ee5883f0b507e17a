"""Settings of the trainer: the ``[train]`` table of a profile. No torch here."""

import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.formats.batch_split import Layout
from trainer.formats.nested_tables import flatten_table
from trainer.formats.tables import StrictTable

PROFILE_SCHEMA_VERSION: Literal[3] = 3
"""Version of the tables and keys of a profile; a profile of another one is rejected."""

# Types of settings, whose values are documented at the settings themselves.
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Precision = Literal["fp32", "bf16"]
STAGING_TIMEOUT_S = 3600.0
"""Longest wait for another process that stages the dataset, in seconds."""
TRIMMED_LAYOUTS: tuple[Layout, ...] = ("dynamic", "bucketed")
"""Layouts that pad each micro-batch only to its longest sample."""
Strategy = Literal["ddp", "zero1", "fsdp2"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
Attention = Literal["auto", "varlen", "fa4", "sdpa"]
Head = Literal["sparse", "dense"]
"""Positions for which a layer computes its output."""
Checkpointing = Literal["none", "selective", "full"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead"]
Float8 = Literal["none", "tensorwise", "rowwise"]
Policy = Literal["warn", "skip", "rollback"]
"""Response to an unusual loss or gradient norm."""
Logger = Literal["tensorboard", "wandb"]


class Tag(enum.Enum):
    """Groups of settings; ``tagged`` returns the names of a group's settings."""

    SPEED = enum.auto()
    """Settings that change the speed of a step but not the training."""
    PROBED = enum.auto()
    """Settings that the largest micro-batch size depends on."""
    LOADER = enum.auto()
    """Settings of the DataLoader."""


class ModelSettings(StrictTable):
    """Model to pretrain from scratch."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Name of the model, part of file names: letters, digits, ``.``, ``_`` and ``-``
    only."""
    config: dict[str, Any]
    """transformers config: ``model_type`` and all values that differ from its defaults,
    without ``vocab_size``."""
    null_keys: list[str] = Field(default_factory=list)
    """Keys of ``config`` whose value is null, which TOML does not support."""

    @field_validator("config")
    @classmethod
    def _require_model_type(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Reject a config that does not name its architecture."""
        if not isinstance(config.get("model_type"), str):
            raise ValueError("requires a model_type, such as 'bert'")
        return config


class DataSettings(StrictTable):
    """Dataset and data loading."""

    path: str | None = None
    """Dataset directory, relative to the profile (never absolute); ``--data`` and
    ``AUTOTUNE_DATA`` override it."""
    dataset_hash: str | None = None
    """Hash of the dataset that the profile was tuned on; training rejects any other
    dataset."""
    num_workers: Annotated[NonNegative, Tag.LOADER] = 0
    """DataLoader workers per GPU; 0 loads data in the training process."""
    prefetch_factor: Annotated[Positive, Tag.LOADER] = 2
    """Micro-batches that each DataLoader worker prefetches; no effect without
    workers."""
    pin_memory: Annotated[bool, Tag.LOADER] = True
    """Load batches into pinned (page-locked) memory for asynchronous copies to the GPU;
    no effect on a CPU."""
    stage_to: str | None = None
    """Directory on each node's local disk to copy the dataset to before training, such
    as ``$TMPDIR``; environment variables are expanded. One process per node copies
    while the others wait; an intact copy is reused."""


class ParallelSettings(StrictTable):
    """Parallel strategy and gradient synchronisation."""

    strategy: Strategy = "ddp"
    """Parallel strategy. ``ddp`` replicates weights, gradients and optimizer state on
    every rank, ``zero1`` shards the optimizer state, ``fsdp2`` shards all three and
    gathers weights layer by layer."""
    shard_ranks: Positive | None = None
    """Ranks that share one copy of the model with ``fsdp2`` (HSDP), usually the GPUs of
    a node; by default all."""
    bucket_cap_mib: Positive = 25
    """Size of DDP's gradient buckets (``ddp`` and ``zero1``), in MiB; try larger ones
    on slow networks, many nodes."""
    gradient_as_bucket_view: bool = True
    """Store gradients in DDP's buckets; if false, every gradient is stored twice."""
    static_graph: bool = False
    """Let DDP assume that every step uses the same parameters in the same order, as
    these models do."""
    gradient_dtype: GradientDtype = "fp32"
    """Dtype of gradients during synchronisation; 16 bits halve the traffic and change
    the recipe."""
    timeout_s: Annotated[float, Field(ge=1, le=7 * 86400)] = 600.0
    """Seconds without progress on a rank after which the run ends as hung. Must exceed
    the time to compile layers and the longest stall of a checkpoint write."""


class EvaluationSettings(StrictTable):
    """Evaluation on the validation split: always the same sequences and masks."""

    interval_steps: Positive | None = None
    """Optimizer steps between evaluations during training; the final model is always
    evaluated."""
    max_sequences: Positive = 2048
    """Maximum number of sequences to evaluate, over all ranks: the first of the
    validation split in a seeded order."""


class CheckpointSettings(StrictTable):
    """Checkpoints of the training state: when they are written, and which are kept."""

    enabled: bool = True
    """Write checkpoints; without them, a run saves only the final model and cannot be
    resumed."""
    interval_s: PositiveFloat = 600.0
    """Seconds between the starts of two checkpoints: about as much work as a killed run
    loses."""
    interval_steps: Positive | None = None
    """Optimizer steps between checkpoints, in addition to those by time."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep; the newest good one, for rollbacks, is
    always kept too."""
    keep_every_steps: Positive | None = None
    """Optimizer steps between checkpoints that are never removed."""
    asynchronous: bool = True
    """Write checkpoints in the background, from a copy of the state in host memory."""


class HealthSettings(StrictTable):
    """Responses to unusual losses and gradient norms.

    ``warn`` reports and continues. ``skip`` skips the update of that step. ``rollback``
    returns to the last good checkpoint, skips the data since then, and lowers the
    learning rate for a while.
    """

    on_non_finite: Literal["skip", "rollback"] = "skip"
    """Response to a loss or gradient norm that is NaN or infinite; such a step is never
    applied."""
    on_spike: Policy = "warn"
    """Response to a loss far above the previous ones."""
    on_explosion: Policy = "warn"
    """Response to a gradient norm far above both the previous ones and
    ``max_grad_norm``."""
    window_steps: Annotated[int, Field(ge=8)] = 128
    """Number of previous steps that a loss or gradient norm is compared with."""
    spike_sigmas: PositiveFloat = 8.0
    """Spike and explosion threshold: robust standard deviations above the window's
    median, at least 10 % above it."""
    explosion_ratio: PositiveFloat = 10.0
    """Multiple of ``max_grad_norm`` that a gradient norm must also exceed to be an
    explosion."""
    plateau_window_steps: Annotated[int, Field(ge=20)] = 2000
    """Shortest window for plateau detection, in steps: the loss must be clearly lower
    in its second half."""
    patience_steps: Positive = 5
    """Consecutive skipped steps after which training rolls back."""
    max_rollbacks: NonNegative = 3
    """Rollbacks without progress after which training gives up, with exit code 76."""
    eased_learning_rate_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rate after a rollback, applied again after each further
    rollback without progress."""
    easing_steps: Positive = 200
    """Steps until the learning rate is back on its schedule; a run that is so far past
    a problem has made progress."""


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
    """Layout of samples in sequences. ``padded``: one sample, padded to full length.
    ``dynamic``: one sample, padded to the longest of its micro-batch. ``bucketed``:
    ``dynamic``, with samples of similar length in a micro-batch. ``packed``: as many
    samples as fit, with no cross-document attention."""
    micro_batch_size: Annotated[Positive, Tag.SPEED] = 8
    """Sequences per micro-batch on each GPU."""
    global_batch_size: Positive = 256
    """Global batch: sequences per optimizer step over all GPUs, exact for any number of
    GPUs (default: BERT's)."""
    global_batch_tokens: Positive | None = None
    """Global batch in non-padding tokens, converted to sequences on average; overrides
    ``global_batch_size``."""
    global_batch_samples: Positive | None = None
    """Global batch in samples, converted in the same way; cannot be used with
    ``global_batch_tokens``."""
    max_steps: Positive = 1000
    """Optimizer steps of the run."""
    max_epochs: Positive | None = None
    """Passes over the dataset after which the run ends early; the learning rate still
    follows ``max_steps``."""
    stop_after_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Time limit from the start of the process, in seconds; before it, the run saves
    its state and exits with code 75, to be resumed. Under SLURM the job's time limit
    applies as well."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate (default: Devlin et al. 2018)."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Learning-rate schedule after warm-up. ``linear`` and ``cosine`` decay to the
    final rate by ``max_steps``, ``wsd`` (warm-up, stable, decay) decays in the last
    part only, ``constant`` stays at the peak."""
    warmup_steps: NonNegative = 100
    """Optimizer steps of linear learning-rate warm-up."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of ``max_steps`` in which ``wsd`` decays."""
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a fraction of the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of AdamW, applied to matrices only, not to biases and normalisation
    weights."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment, the mean of gradients."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate of AdamW's second moment, the mean of squared gradients."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term that AdamW adds to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clipping threshold: largest L2 norm of all gradients together."""
    masking_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of non-special tokens to predict: 80 % of them become [MASK], 10 % a
    random token, 10 % stay."""
    attention: Annotated[Attention, Tag.SPEED] = "auto"
    """Attention kernel. ``varlen`` computes each document separately (Ampere or newer
    GPU, bf16, no attention dropout), ``sdpa`` whole sequences under a mask. ``fa4``
    computes as ``varlen``, forward and backward each in the faster of FlashAttention 2
    and 4 for your documents (Hopper GPU, ``pip install '.[fa4]'``). ``auto`` uses
    ``varlen`` if possible; the run prints the choice."""
    attention_dropout: Annotated[
        float | None, Field(ge=0, lt=1), Tag.SPEED, Tag.PROBED
    ] = None
    """Dropout of attention weights, instead of the model's own: a change of recipe,
    recorded in every run."""
    mlm_head: Annotated[Head, Tag.SPEED] = "sparse"
    """Positions for which the MLM head computes logits: ``sparse``, masked tokens only;
    ``dense``, all. Same loss."""
    fused_cross_entropy: Annotated[bool, Tag.SPEED, Tag.PROBED] = False
    """Compute the MLM head's last layer and its loss in pieces with Liger (``pip
    install '.[liger]'``), which saves the memory of logits. Requires a GPU and a sparse
    MLM head; the host waits for each micro-batch."""
    last_layer: Annotated[Head, Tag.SPEED] = "sparse"
    """Positions for which the last layer computes queries and MLP: ``sparse``, masked
    tokens only; ``dense``, all. The loss is the same; ``sparse`` requires a sparse MLM
    head to have an effect."""
    activation_checkpointing: Annotated[Checkpointing, Tag.SPEED, Tag.PROBED] = "none"
    """Activation checkpointing, which trades speed for memory. ``selective`` keeps
    outputs of matmuls and attention, ``full`` only the input of each layer."""
    compile: Annotated[bool | None, Tag.SPEED, Tag.PROBED] = None
    """Compile each layer with ``torch.compile``, which takes minutes at the first start
    and speeds up steps. By default on a GPU, if Triton and a C compiler are installed.
    """
    compile_mode: Annotated[CompileMode, Tag.SPEED] = "default"
    """Mode of ``torch.compile`` on a GPU. ``max-autotune-no-cudagraphs`` also times
    Triton's matmuls, which can add a bias and apply GELU before they store a result;
    ``reduce-overhead`` replays CUDA graphs of small micro-batches."""
    mix_order_reduction: Annotated[bool, Tag.SPEED] = False
    """Let ``torch.compile`` compute a layer norm's input gradient and the sums of its
    weight gradients in one kernel on a GPU. torch's own default is true; with 256
    sequences of bert-120m, a step took 16 % longer with it (H100, torch 2.11)."""
    combo_kernels: Annotated[bool, Tag.SPEED] = True
    """Let ``torch.compile`` compute sums that do not depend on each other in one kernel
    on a GPU; never with ``float8``, whose casts it makes slower."""
    fused_norms: Annotated[bool, Tag.SPEED, Tag.PROBED] = False
    """Compute dropout, residual sum and layer norm of BERT's and RoBERTa's layers in
    one Triton kernel, and their gradients in another, instead of those that
    ``torch.compile`` generates. Requires a GPU, Triton and bf16; cannot be used with
    ``fsdp2``. Its speed is not measured."""
    gelu_epilogues: Annotated[bool, Tag.SPEED, Tag.PROBED] = False
    """Compute GELU and its gradient in Triton matmuls of BERT's and RoBERTa's MLP,
    before they store their results; GELU is computed again in the backward pass instead
    of being kept. Requires a GPU, Triton and bf16; cannot be used with ``float8`` or
    ``fsdp2``. Its speed is not measured."""
    precision: Annotated[Precision, Tag.SPEED, Tag.PROBED] = "fp32"
    """Compute precision; ``bf16`` is autocast. Weights and optimizer state stay in
    fp32."""
    residual_dtype: Annotated[Literal["fp32", "bf16"], Tag.SPEED, Tag.PROBED] = "fp32"
    """Dtype of the residual stream with ``precision = bf16``. ``bf16`` saves memory and
    traffic, and is a change of recipe, recorded in every run."""
    float8: Annotated[Float8, Tag.SPEED, Tag.PROBED] = "none"
    """Compute linear layers of the encoder in float8 with torchao (``pip install
    '.[fp8]'``), with a scaling factor per tensor (``tensorwise``) or row (``rowwise``).
    Requires compiled layers in bf16 and an Ada, Hopper or newer GPU. A change of
    recipe, recorded in every run."""
    tf32: Annotated[bool, Tag.SPEED] = True
    """Compute ``fp32`` matmuls in TF32 on Ampere and newer GPUs, with inputs rounded to
    10 mantissa bits."""
    device: Annotated[Literal["cpu", "cuda"], Tag.PROBED] = "cpu"
    """Device to train on."""
    seed: NonNegative = 0
    """Seed of initial weights, sample order, masks and dropout."""
    log_interval_steps: Positive | None = None
    """Optimizer steps between logged metrics (``steps.jsonl``, console, ``log_to``);
    default: 10 on a GPU, else 1."""
    log_to: list[Logger] | None = None
    """Loggers that get the metrics beside ``steps.jsonl``: ``tensorboard``, ``wandb``
    (Weights & Biases, which follows its environment variables). By default TensorBoard,
    if it is installed; an empty list is none."""

    @property
    def logged_steps(self) -> int:
        """Optimizer steps between logged metrics."""
        return self.log_interval_steps or (10 if self.device == "cuda" else 1)

    @property
    def compiled(self) -> bool:
        """True if layers are compiled; by default on a GPU."""
        return self.device == "cuda" if self.compile is None else self.compile

    @field_validator("precision", mode="before")
    @classmethod
    def _reject_fp16(cls, value: object) -> object:
        """Reject fp16 with a reason, before the check of the valid values."""
        if value == "fp16":
            raise ValueError(
                "fp16 is not supported, as its gradients overflow without loss"
                " scaling; use bf16 on Ampere and newer GPUs, fp32 elsewhere"
            )
        return value

    @model_validator(mode="after")
    def _reject_conflicts(self) -> "TrainConfig":
        """Reject settings that cannot be used with each other."""
        sharded = self.parallel.strategy == "fsdp2"
        if (
            self.global_batch_tokens is not None
            and self.global_batch_samples is not None
        ):
            raise ValueError(
                "global_batch_tokens cannot be used with global_batch_samples"
            )
        if self.parallel.shard_ranks is not None and not sharded:
            raise ValueError(
                "parallel.shard_ranks requires parallel.strategy = 'fsdp2'"
            )
        if self.parallel.static_graph and sharded:
            raise ValueError(
                "parallel.static_graph cannot be used with parallel.strategy = 'fsdp2'"
            )
        if self.data.path is not None and Path(self.data.path).is_absolute():
            raise ValueError(
                "data.path must be relative to the profile; pass an absolute path with"
                " --data"
            )
        return self


def gradient_accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Return the gradient accumulation steps that keep ``global_batch_size`` exact."""
    return math.ceil(config.global_batch_size / (config.micro_batch_size * world_size))


def tagged(table: type[StrictTable], tag: Tag) -> tuple[str, ...]:
    """Return the names of a table's settings in a group, in order of declaration."""
    return tuple(
        name for name, field in table.model_fields.items() if tag in field.metadata
    )


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every setting of nested tables by its dotted key.

    The model's config stays one value, as its keys belong to transformers.

    Args:
        table: Settings in the form of the ``[train]`` table of a profile.
        prefix: Text before each key, such as ``train.``.
    """
    return flatten_table(table, prefix, whole="config")
