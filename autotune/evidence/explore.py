"""Evidence of a joint search over the settings of a training step."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import Interval, RatioBounds
from autotune.base.wording import plural
from trainer.config.train_config import (
    Attention,
    Checkpointing,
    CompileMode,
    Float8,
    Precision,
    TrainConfig,
)
from trainer.formats.batch_split import Layout
from trainer.formats.tables import StrictTable


class Configuration(StrictTable):
    """Settings of a training step that are searched jointly.

    They leave the recipe unchanged, up to rounding.
    """

    precision: Precision
    attention: Attention
    activation_checkpointing: Checkpointing
    compile: bool
    compile_mode: CompileMode = "default"
    mix_order_reduction: bool = False
    combo_kernels: bool = True
    fused_norms: bool = False
    gelu_epilogues: bool = False
    float8: Float8 = "none"
    fused_cross_entropy: bool = False
    layout: Layout
    micro_batch_size: PositiveInt

    @classmethod
    def of(cls, config: TrainConfig | Mapping[str, Any]) -> "Configuration":
        """Return the searched settings of a training configuration."""
        plain = (
            config.model_dump() | {"compile": config.compiled}
            if isinstance(config, TrainConfig)
            else config
        )
        return cls.model_validate(
            {name: plain[name] for name in KNOBS} | {"compile": bool(plain["compile"])}
        )

    @property
    def arithmetic(self) -> str:
        """Settings by which results are rounded, as text.

        Other settings are verified by tests to compute the same.
        """
        words = [
            self.precision,
            "fa4" if self.attention == "fa4" else "",
            f"{self.float8} float8",
        ]
        words += ["fused cross-entropy" if self.fused_cross_entropy else ""]
        words += ["fused norms" if self.fused_norms else ""]
        words += ["GELU epilogues" if self.gelu_epilogues else ""]
        words += [
            (
                "autotuned matmuls"
                if self.compile_mode == "max-autotune-no-cudagraphs"
                else ""
            )
        ]
        return ", ".join(word for word in words if word not in ("none float8", ""))

    @property
    def possible(self) -> bool:
        """False for settings that the trainer rejects together."""
        own_kernels = [self.fused_norms, self.gelu_epilogues]
        narrow = self.attention == "fa4" or self.float8 != "none" or any(own_kernels)
        # The compiler's options, and kernels that replace its own, are searched one at
        # a time.
        compiler_options = [
            self.compile_mode != "default",
            self.mix_order_reduction,
            not self.combo_kernels,
        ]
        compiling = self.float8 != "none" or any(compiler_options)
        return (
            (not narrow or self.precision == "bf16")
            and (not compiling or self.compile)
            and sum([*compiler_options, *own_kernels]) <= 1
            and not (self.gelu_epilogues and self.float8 != "none")
        )

    def but(self, **settings: object) -> "Configuration":
        """Return a configuration with other settings."""
        return self.model_copy(update=settings)

    @property
    def kind(self) -> "Configuration":
        """Configuration with a micro-batch size of 1.

        It is equal for all micro-batch sizes of the same settings.
        """
        return self.but(micro_batch_size=1)

    @property
    def name(self) -> str:
        """Short description for tables and labels."""
        words = [
            plural(self.micro_batch_size, f"{self.layout} sequence"),
            self.arithmetic,
            self.attention,
        ]
        words += [
            f"{self.activation_checkpointing} checkpointing",
            "compiled" if self.compile else "",
        ]
        words += ["CUDA graphs" if self.compile_mode == "reduce-overhead" else ""]
        words += ["mix-order reductions" if self.mix_order_reduction else ""]
        words += ["" if self.combo_kernels else "no combined kernels"]
        return ", ".join(
            word
            for word in words
            if word not in ("auto", "fa4", "none checkpointing", "")
        )


KNOBS = tuple(Configuration.model_fields)


class ExploredRow(StrictTable):
    """Configuration that was tried, and its result."""

    settings: Configuration
    windows: NonNegativeInt
    """Number of full and short windows."""
    tokens_per_s: PositiveFloat | None = None
    """Median non-padding tokens/s; None if it did not run."""
    ratio_to_starting: PositiveFloat | None = None
    """Median ratio to the starting configuration in the same round, of full windows, or
    of short ones if there are no full ones. None for the starting configuration itself,
    and if nothing ran."""
    predicted_ratio: PositiveFloat | None = None
    """The same, as predicted from traces of both steps; None without a trace or
    constants of the machine."""
    outcome: str
    """``ran``, ``pruned`` after a short window, or the reason why it did not run."""


class ExploreEvidence(RatioBounds):
    """Result of a search over the settings of a training step."""

    configurations: PositiveInt
    """Number of configurations in the search space, without those predicted not to
    fit."""
    trials: NonNegativeInt
    """Number of configurations that were tried, including those that did not run."""
    windows: NonNegativeInt
    pruned: NonNegativeInt
    """Number of configurations that were rejected after one short window."""
    starting: Configuration
    chosen: Configuration
    """Configuration to train with; equals ``starting`` if none was verified to be
    faster."""
    candidate: Configuration
    """Most promising configuration, which was compared with the starting
    configuration."""
    ratio_to_starting: PositiveFloat
    """Non-padding tokens/s of the candidate over the starting configuration's, in
    windows of the same rounds."""
    adopted: bool
    choice: str
    """Reason for the chosen settings."""
    stopped_because: str
    equal_loss: str | None = None
    """Result of the loss check if rounding differs: of the chosen settings, or of
    faster ones that it rejected. None if there was nothing to check."""
    left_out: list[str] = Field(default_factory=list)
    """Settings and values that were not searched, and why."""
    rows: list[ExploredRow]
    seconds: NonNegativeFloat

    @property
    def ratio(self) -> Interval:
        """Ratio to the starting configuration, with its bounds."""
        return self.bounded(self.ratio_to_starting)
