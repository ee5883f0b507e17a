"""Settings of the bundled trainer that are searched together, and what they mean.

They leave the recipe unchanged, up to rounding.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from autotune.base.wording import plural
from autotune.machine.measured_device import MeasuredDevice
from autotune.profiles.decide.batch_split import (
    GlobalBatchSplit,
    global_batch_size_of,
    split_global_batch,
)
from autotune.subjects.searched_settings import Choice, value_words
from autotune.subjects.subject import MICRO_BATCH_SIZE, Argument, Setting, Size
from autotune.trials.decide.equal_loss import CHECK_WARM_UP_STEPS
from trainer.config.compilers import missing_for_compile, missing_for_triton
from trainer.config.packages import has_flash_attention_4
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import SequenceStatistics, sequence_statistics
from trainer.formats.families import FAMILIES
from trainer.formats.model_config import attention_dropout
from trainer.formats.train_config import (
    TRIMMED_LAYOUTS,
    Checkpointing,
    CompileMode,
    Float8,
    TrainConfig,
)

SIZE_DOUBLINGS = 5
"""Halvings of the largest useful micro-batch down to the smallest to try: far below the
knee nothing is fastest."""
COMPILER_OPTIONS = ("compile_mode", "mix_order_reduction", "combo_kernels")
"""Settings that only compiled layers on a GPU have."""
TRITON_SETTINGS = ("fused_norms", "gelu_epilogues")
"""Settings whose kernels are the trainer's own, in Triton."""
ROUNDING_SETTINGS = (
    "precision",
    "attention",
    "float8",
    "fused_cross_entropy",
    "fused_norms",
    "gelu_epilogues",
    "compile_mode",
)
"""Settings of which some values round differently."""
TRIED_VALUES: Mapping[str, tuple[Argument, ...]] = {
    "precision": ("fp32", "bf16"),
    "attention": ("auto", "sdpa"),
    "activation_checkpointing": get_args(Checkpointing),
    "compile": (False, True),
    "compile_mode": get_args(CompileMode),
    "mix_order_reduction": (False, True),
    "combo_kernels": (True, False),
    "fused_norms": (False, True),
    "gelu_epilogues": (False, True),
    "float8": get_args(Float8),
    "fused_cross_entropy": (False, True),
    "layout": ("packed", "bucketed", "padded"),
}
"""Values to try of each setting, if the device, the model and your request allow."""
_FIXED_BY_REQUEST = tuple(
    name
    for name in TRIED_VALUES
    if name not in ("attention", "activation_checkpointing", "compile")
)
"""Settings that are not searched if you set them."""
_NEUTRAL: Mapping[str, Argument] = {
    "compile_mode": "default",
    "mix_order_reduction": False,
    "combo_kernels": True,
    "fused_norms": False,
    "gelu_epilogues": False,
    "float8": "none",
    "fused_cross_entropy": False,
}
"""Values with which a setting that a choice leaves out has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSupport:
    """Capabilities of this machine for a step."""

    device: str
    """``cpu`` or ``cuda``."""
    compute_capability: tuple[int, int] = (0, 0)
    """Of the GPU; (0, 0) on a CPU."""
    missing_for_compile: str | None = None
    """Requirement that ``torch.compile`` lacks; None if it lacks none."""
    missing_for_triton: str | None = None
    """Requirement that Triton's kernels lack; None if they lack none."""
    packages: frozenset[str] = frozenset()
    """Those of ``flash-attn-4``, ``torchao`` and ``liger_kernel`` that are
    installed."""

    @property
    def on_gpu(self) -> bool:
        """True if the step runs on a GPU."""
        return self.device == "cuda"


def step_support(site: MeasuredDevice) -> StepSupport:
    """Return what a measured machine supports."""
    modules = {name for name in ("torchao", "liger_kernel") if find_spec(name)}
    if has_flash_attention_4():
        modules.add("flash-attn-4")
    capability = None if site.gpu is None else site.gpu.compute_capability
    return StepSupport(
        device=site.device,
        compute_capability=capability or (0, 0),
        missing_for_compile=missing_for_compile(site.device),
        missing_for_triton=missing_for_triton(),
        packages=frozenset(modules),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """A layout of the dataset's samples, at the same non-padding tokens a step."""

    statistics: SequenceStatistics
    """Content of its sequences."""
    global_batch_size: int
    """Sequences of an optimizer step; equal tokens are fewer packed sequences than
    padded ones."""
    seq_length_tokens: int
    """Positions of a sequence that is not trimmed."""
    is_trimmed: bool
    """True if micro-batches are padded only to their longest sample."""
    counts_own_tokens: bool
    """True if windows differ in their share of non-padding tokens, so that each counts
    its own."""

    @property
    def non_padding_share(self) -> float | None:
        """Average share of non-padding tokens; None if each window counts its own."""
        if self.counts_own_tokens:
            return None
        return self.statistics.mean_non_padding_tokens / self.seq_length_tokens

    @property
    def computed_share(self) -> float:
        """Share of the positions that are computed: all, unless they are trimmed."""
        if not self.is_trimmed:
            return 1.0
        return self.statistics.mean_non_padding_tokens / self.seq_length_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmSettings:
    """The trainer's settings that are searched, at the same global batch."""

    config: TrainConfig
    """Settings of the profile; a choice replaces some of them."""
    settings: tuple[Setting, ...]
    layouts: Mapping[str, LayoutFacts]
    """Layouts of the dataset, by name."""
    ranks: int = 1
    """Ranks that train together."""
    left_out: tuple[str, ...] = ()

    @property
    def size(self) -> Size:
        """Sequences of a micro-batch."""
        return Size(
            noun="sequence",
            unit="tokens",
            units_per_size=float(self.config.seq_length_tokens),
        )

    @property
    def starting(self) -> dict[str, Argument]:
        """The profile's own choice, with its micro-batch size."""
        choice = {setting.name: setting.values[0] for setting in self.settings}
        return choice | {MICRO_BATCH_SIZE: self.config.micro_batch_size}

    def is_possible(self, choice: Choice) -> bool:
        """Return whether the trainer accepts these settings together."""
        return is_accepted(choice)

    def sizes(self, choice: Choice, largest: int) -> tuple[int, ...]:
        """Return micro-batch sizes to try, as the global batch is split."""
        return micro_batch_sizes(self._global_batch_size(choice), self.ranks, largest)

    def trained_size(self, choice: Choice) -> int:
        """Return the micro-batch size after an even split of the global batch."""
        return self._split(choice).micro_batch_size

    def useful_share(self, choice: Choice) -> float:
        """Return the share of the computed sequences that the global batch fills."""
        split = self._split(choice)
        micro_batches = split.gradient_accumulation_steps * self.ranks
        computed = micro_batches * split.micro_batch_size
        return self._global_batch_size(choice) / computed

    def starts_slowly(self, choice: Choice) -> bool:
        """Return whether layers are compiled first."""
        return bool(choice["compile"])

    def arithmetic(self, choice: Choice) -> str:
        """Return the settings by which results are rounded, in words."""
        return arithmetic_words(choice)

    def words(self, choice: Choice) -> str:
        """Return a short description: micro-batch, arithmetic, and what is unusual."""
        return choice_words(choice)

    def non_padding_share(self, choice: Choice) -> float | None:
        """Return the average share of non-padding tokens in the layout's sequences."""
        return self.layout(choice).non_padding_share

    def window_choice(self, choice: Choice) -> dict[str, Argument]:
        """Return the choice with the global batch in sequences of its layout."""
        return {**choice, "global_batch_size": self._global_batch_size(choice)}

    def loss_check_choice(self, choice: Choice) -> dict[str, Argument]:
        """Return the choice with a warm-up that is shorter than the check."""
        return self.window_choice(choice) | {"warmup_steps": CHECK_WARM_UP_STEPS}

    @property
    def window_config(self) -> TrainConfig:
        """Settings of windows, whose global batch each choice sets in sequences."""
        return self.config.model_copy(
            update={"global_batch_tokens": None, "global_batch_samples": None}
        )

    def layout(self, choice: Choice) -> LayoutFacts:
        """Return the layout of a choice."""
        return self.layouts[str(choice["layout"])]

    def _global_batch_size(self, choice: Choice) -> int:
        return self.layout(choice).global_batch_size

    def _split(self, choice: Choice) -> GlobalBatchSplit:
        size = int(choice[MICRO_BATCH_SIZE])
        return split_global_batch(self._global_batch_size(choice), size, self.ranks)


def is_accepted(choice: Choice) -> bool:
    """Return whether the trainer accepts these settings together.

    The compiler's options, and kernels that replace its own, are searched one at a
    time.
    """
    precision, attention, compiled = (
        choice["precision"],
        choice["attention"],
        choice["compile"],
    )
    is_float8 = _value(choice, "float8") != "none"
    own_kernels = [bool(_value(choice, name)) for name in TRITON_SETTINGS]
    compiler_options = [
        _value(choice, name) != _NEUTRAL[name] for name in COMPILER_OPTIONS
    ]
    requires_bf16 = attention == "fa4" or is_float8 or any(own_kernels)
    requires_compile = is_float8 or any(compiler_options)
    if requires_bf16 and precision != "bf16":
        return False
    if requires_compile and not compiled:
        return False
    if is_float8 and _value(choice, "gelu_epilogues"):
        return False
    return sum([*compiler_options, *own_kernels]) <= 1


def arithmetic_words(choice: Choice) -> str:
    """Return the settings by which results are rounded, in words.

    Tests of the trainer verify that other settings compute the same.
    """
    return ", ".join(_arithmetic(choice))


def _arithmetic(choice: Choice) -> Iterator[str]:
    yield str(choice["precision"])
    if choice["attention"] == "fa4":
        yield "fa4"
    if _value(choice, "float8") != "none":
        yield f"{_value(choice, 'float8')} float8"
    if _value(choice, "fused_cross_entropy"):
        yield "fused cross-entropy"
    if _value(choice, "fused_norms"):
        yield "fused norms"
    if _value(choice, "gelu_epilogues"):
        yield "GELU epilogues"
    if _value(choice, "compile_mode") == "max-autotune-no-cudagraphs":
        yield "autotuned matmuls"


def choice_words(choice: Choice) -> str:
    """Return a choice in words, for tables and labels."""
    size = int(choice[MICRO_BATCH_SIZE])
    words = [
        plural(size, f"{choice['layout']} sequence"),
        *_arithmetic(choice),
        *_speed_words(choice),
    ]
    return ", ".join(words)


def _speed_words(choice: Choice) -> Iterator[str]:
    """Yield the settings that do not change rounding, as far as they are unusual."""
    if choice["attention"] not in ("auto", "fa4"):
        yield str(choice["attention"])
    if choice["activation_checkpointing"] != "none":
        yield f"{choice['activation_checkpointing']} checkpointing"
    if choice["compile"]:
        yield "compiled"
    if _value(choice, "compile_mode") == "reduce-overhead":
        yield "CUDA graphs"
    if _value(choice, "mix_order_reduction"):
        yield "mix-order reductions"
    if not _value(choice, "combo_kernels"):
        yield "no combined kernels"


def _value(choice: Choice, name: str) -> Argument:
    """Return a setting's value; the neutral one if the choice leaves it out."""
    return choice.get(name, _NEUTRAL[name])


def micro_batch_sizes(
    global_batch_size: int, ranks: int, largest: int
) -> tuple[int, ...]:
    """Return micro-batch sizes to try, ascending, as the global batch is split.

    They are the largest useful size and powers of two below it. There are none if a
    rank would idle.
    """
    largest = min(largest, -(-global_batch_size // ranks))
    if largest < 1 or global_batch_size < ranks:
        return ()
    powers = (2**exponent for exponent in range(largest.bit_length()))
    sizes = [size for size in (*powers, largest) if size * 2**SIZE_DOUBLINGS >= largest]
    trained = {
        split_global_batch(global_batch_size, size, ranks).micro_batch_size
        for size in sizes
    }
    return tuple(sorted(trained))


def dataset_layouts(
    config: TrainConfig, layouts: Collection[str], data: Path, global_batch_tokens: int
) -> dict[str, LayoutFacts]:
    """Return the layouts of a dataset, by name.

    Args:
        config: Settings of the profile.
        layouts: Names of the layouts.
        data: Directory of the dataset.
        global_batch_tokens: Non-padding tokens of an optimizer step.

    Raises:
        TrainerError: If the dataset cannot be read.
    """
    facts = {}
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        for layout in layouts:
            laid_out = config.model_copy(update={"layout": layout})
            statistics = sequence_statistics(laid_out, dataset)
            facts[layout] = LayoutFacts(
                statistics=statistics,
                global_batch_size=global_batch_size_of(
                    global_batch_tokens, statistics.mean_non_padding_tokens
                ),
                seq_length_tokens=config.seq_length_tokens,
                is_trimmed=laid_out.layout in TRIMMED_LAYOUTS,
                counts_own_tokens=laid_out.layout == "bucketed",
            )
    return facts


def settings_to_search(
    config: TrainConfig, requested: TrainConfig, support: StepSupport
) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Return the settings to search, and the reasons for what is left out.

    Args:
        config: Settings of the profile, whose values come first.
        requested: Settings as you requested them: some of those that you set are not
            searched.
        support: What the machine supports.
    """
    values = dict(TRIED_VALUES)
    left_out = []
    for name, reason, kept_values in _restrictions(config, requested, support):
        values[name] = kept_values
        if reason is not None:
            left_out.append(f"{name}: {reason}")
    if _has_flash_attention_4(config, support) and values["attention"]:
        values["attention"] = (*values["attention"], "fa4")
    present: dict[str, Argument] = {name: getattr(config, name) for name in values}
    present["compile"] = config.compiled
    if values["attention"]:
        present["attention"] = "auto"
    settings = tuple(
        Setting(
            name=name,
            values=tuple(dict.fromkeys((present[name], *tried))),
            changes_rounding=name in ROUNDING_SETTINGS,
        )
        for name, tried in values.items()
    )
    return settings, tuple(left_out)


_Restriction = tuple[str, str | None, tuple[Argument, ...]]
"""Setting, reason to show (None if it is obvious), and the values that remain besides
the present one."""


def _restrictions(
    config: TrainConfig, requested: TrainConfig, support: StepSupport
) -> Iterator[_Restriction]:
    """Yield the settings of which not all values can be tried, and why."""
    for name in _FIXED_BY_REQUEST:
        if name in requested.model_fields_set:
            yield name, f"you set {value_words(getattr(config, name))}", ()
    model_type = config.model.config["model_type"]
    may_vary_layout = "layout" not in requested.model_fields_set
    if may_vary_layout and model_type not in FAMILIES:
        yield "layout", f"{model_type} cannot be packed", ("padded", "bucketed")
    if support.missing_for_compile is not None:
        yield "compile", support.missing_for_compile, ()
    if not support.on_gpu:
        yield "attention", "varlen requires a GPU", ()
    yield from _gpu_restrictions(config, requested, support)


def _gpu_restrictions(
    config: TrainConfig, requested: TrainConfig, support: StepSupport
) -> Iterator[_Restriction]:
    """Yield restrictions of settings that only some GPUs and models support."""
    model_type = config.model.config["model_type"]
    can_compile = support.missing_for_compile is None
    if not support.on_gpu or not can_compile:
        for name in COMPILER_OPTIONS:
            yield name, None, ()
    for name in _unusable_triton_settings(config, support):
        yield name, None, ()
    is_plain = (
        support.on_gpu
        and config.parallel.strategy != "fsdp2"
        and model_type in FAMILIES
    )
    if not (is_plain and can_compile and support.compute_capability >= (8, 9)):
        yield "float8", None, ()
    elif (
        "float8" not in requested.model_fields_set and "torchao" not in support.packages
    ):
        yield "float8", "torchao is not installed (pip install '.[fp8]')", ()
    has_fused_loss = (
        is_plain and config.mlm_head == "sparse" and "liger_kernel" in support.packages
    )
    if not has_fused_loss:
        yield "fused_cross_entropy", None, ()


def _unusable_triton_settings(
    config: TrainConfig, support: StepSupport
) -> Sequence[str]:
    """Return the settings whose Triton kernels cannot compute this model here."""
    model = config.model.config
    if (
        not support.on_gpu
        or config.parallel.strategy == "fsdp2"
        or FAMILIES.get(model["model_type"]) != "bert"
        or support.missing_for_triton is not None
    ):
        return TRITON_SETTINGS
    return () if model.get("hidden_act", "gelu") == "gelu" else ("gelu_epilogues",)


def _has_flash_attention_4(config: TrainConfig, support: StepSupport) -> bool:
    """Return whether FlashAttention 4 can compute the model's attention here."""
    return (
        support.on_gpu
        and support.compute_capability[0] == 9
        and attention_dropout(config) == 0
        and "flash-attn-4" in support.packages
    )
