"""Settings of the bundled trainer that are searched together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.profiles.decide.batch_split import split_global_batch
from autotune.subjects.mlm.memory.probe_requests import requested_config
from autotune.subjects.mlm.settings import (
    SIZE_DOUBLINGS,
    StepSupport,
    choice_words,
    dataset_layouts,
    is_accepted,
    micro_batch_sizes,
    settings_to_search,
    step_support,
)
from testbed.examples.feeds import ON_CPU
from trainer.formats.train_config import ModelSettings, TrainConfig

BERT = ModelSettings(name="tiny", config={"model_type": "bert", "hidden_size": 64})
STRANGE = ModelSettings(name="strange", config={"model_type": "something-new"})
TINY = TrainConfig(model=BERT, layout="packed")
NO_DROPOUT = TINY.model_copy(update={"attention_dropout": 0.0})
NO_COMPILER = "no compiler found (g++, c++, clang++)"
CPU = StepSupport(device="cpu", missing_for_triton="Triton is not installed")
CPU_WITHOUT_COMPILER = StepSupport(
    device="cpu", missing_for_compile=NO_COMPILER, missing_for_triton=NO_COMPILER
)
ALL_PACKAGES = frozenset({"flash-attn-4", "torchao", "liger_kernel"})
H100 = StepSupport(device="cuda", compute_capability=(9, 0), packages=ALL_PACKAGES)
A100 = StepSupport(device="cuda", compute_capability=(8, 0), packages=ALL_PACKAGES)
BARE_H100 = StepSupport(device="cuda", compute_capability=(9, 0))
H100_WITHOUT_COMPILER = StepSupport(
    device="cuda",
    compute_capability=(9, 0),
    missing_for_compile=NO_COMPILER,
    missing_for_triton=NO_COMPILER,
    packages=ALL_PACKAGES,
)
FLOAT8 = ("none", "tensorwise", "rowwise")
MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead")


def searched(config, support, **requested):
    settings, left_out = settings_to_search(
        config, requested_config(config.model, **requested), support
    )
    return {setting.name: setting.values for setting in settings}, left_out


@pytest.mark.parametrize(
    ("config", "support", "name", "values"),
    [
        pytest.param(TINY, CPU, "compile", (False, True), id="compiler"),
        pytest.param(TINY, H100, "attention", ("auto", "sdpa"), id="dropout"),
        pytest.param(NO_DROPOUT, A100, "attention", ("auto", "sdpa"), id="no fa4"),
        pytest.param(NO_DROPOUT, H100, "attention", ("auto", "sdpa", "fa4"), id="fa4"),
        pytest.param(
            NO_DROPOUT, BARE_H100, "attention", ("auto", "sdpa"), id="fa4 missing"
        ),
        pytest.param(TINY, A100, "compile_mode", MODES, id="compile modes"),
        pytest.param(TINY, CPU, "compile_mode", ("default",), id="modes on a CPU"),
        pytest.param(
            TINY, H100_WITHOUT_COMPILER, "compile_mode", ("default",), id="no modes"
        ),
        pytest.param(TINY, H100, "float8", FLOAT8, id="float8"),
        pytest.param(TINY, A100, "float8", ("none",), id="float8 requires an H100"),
        pytest.param(TINY, CPU, "float8", ("none",), id="float8 on a CPU"),
        pytest.param(TINY, H100, "fused_norms", (False, True), id="fused norms"),
        pytest.param(TINY, CPU, "fused_norms", (False,), id="norms on a CPU"),
        pytest.param(
            TINY, H100_WITHOUT_COMPILER, "fused_norms", (False,), id="no Triton"
        ),
        pytest.param(TINY, H100, "gelu_epilogues", (False, True), id="GELU"),
        pytest.param(TINY, H100, "fused_cross_entropy", (False, True), id="fused loss"),
        pytest.param(
            TINY, BARE_H100, "fused_cross_entropy", (False,), id="no fused loss"
        ),
    ],
)
def test_values_depend_on_the_machine(config, support, name, values):
    values_by_name, left_out = searched(config, support)
    assert values_by_name[name] == values
    assert not [reason for reason in left_out if reason.startswith(f"{name}:")]


@pytest.mark.parametrize(
    ("config", "support", "name", "values", "reason"),
    [
        pytest.param(
            TrainConfig(model=STRANGE, layout="padded"),
            CPU,
            "layout",
            ("padded", "bucketed"),
            "something-new cannot be packed",
            id="unknown model",
        ),
        pytest.param(
            TINY, CPU_WITHOUT_COMPILER, "compile", (False,), NO_COMPILER, id="compiler"
        ),
        pytest.param(
            TINY, CPU, "attention", ("auto",), "varlen requires a GPU", id="attention"
        ),
        pytest.param(
            TINY,
            BARE_H100,
            "float8",
            ("none",),
            "torchao is not installed (pip install '.[fp8]')",
            id="torchao",
        ),
    ],
)
def test_missing_support_is_named(config, support, name, values, reason):
    values_by_name, left_out = searched(config, support)
    assert values_by_name[name] == values
    assert f"{name}: {reason}" in left_out


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("precision", "fp32", "fp32"),
        ("layout", "packed", "packed"),
        ("float8", "none", "none"),
        ("fused_norms", False, "false"),
        ("fused_cross_entropy", False, "false"),
    ],
)
def test_requested_settings_are_fixed(name, value, words):
    values_by_name, left_out = searched(TINY, H100, **{name: value})
    assert values_by_name[name] == (value,)
    assert [reason for reason in left_out if reason.startswith(f"{name}:")] == [
        f"{name}: you set {words}"
    ]


def test_only_rounding_settings_are_marked():
    settings, _ = settings_to_search(TINY, requested_config(BERT), H100)
    marked = {setting.name for setting in settings if setting.changes_rounding}
    assert {"precision", "float8", "fused_norms"} <= marked
    assert not marked & {"layout", "activation_checkpointing", "compile"}


def test_cpu_supports_no_gpu_settings():
    support = step_support(ON_CPU)
    assert (support.device, support.compute_capability) == ("cpu", (0, 0))


CHOICE = {
    "precision": "fp32",
    "attention": "auto",
    "activation_checkpointing": "none",
    "compile": False,
    "layout": "packed",
    "micro_batch_size": 8,
}


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"precision": "bf16", "fused_norms": True}, True),
        ({"fused_norms": True}, False),
        ({"attention": "fa4"}, False),
        ({"precision": "bf16", "attention": "fa4"}, True),
        ({"precision": "bf16", "float8": "rowwise"}, False),
        ({"precision": "bf16", "float8": "rowwise", "compile": True}, True),
        ({"compile_mode": "reduce-overhead"}, False),
        ({"compile_mode": "reduce-overhead", "compile": True}, True),
        (
            {
                "compile_mode": "reduce-overhead",
                "combo_kernels": False,
                "compile": True,
            },
            False,
        ),
        (
            {
                "precision": "bf16",
                "float8": "rowwise",
                "compile": True,
                "gelu_epilogues": True,
            },
            False,
        ),
    ],
)
def test_combinations_that_the_trainer_accepts(changes, accepted):
    assert is_accepted(CHOICE | changes) == accepted


def test_words_show_what_is_unusual():
    assert choice_words(CHOICE) == "8 packed sequences, fp32"
    unusual = {
        "attention": "sdpa",
        "activation_checkpointing": "full",
        "compile": True,
        "precision": "bf16",
    }
    assert (
        choice_words(CHOICE | unusual)
        == "8 packed sequences, bf16, sdpa, full checkpointing, compiled"
    )


RANKS = st.integers(1, 8)


@given(st.integers(1, 5000), RANKS, st.integers(1, 1000))
def test_sizes_ascend_up_to_the_limit(global_batch_size, ranks, largest):
    sizes = micro_batch_sizes(global_batch_size, ranks, largest)
    assert list(sizes) == sorted(set(sizes))
    assert all(1 <= size <= largest for size in sizes)
    if global_batch_size >= ranks:
        useful = min(largest, -(-global_batch_size // ranks))
        assert (
            sizes[-1]
            == split_global_batch(global_batch_size, useful, ranks).micro_batch_size
        )
        assert all(2 * 2**SIZE_DOUBLINGS * size >= useful for size in sizes)


def test_idle_ranks_leave_no_size():
    assert micro_batch_sizes(3, 4, 64) == ()


def test_equal_tokens_are_fewer_packed_sequences(patterned_dataset):
    config = TINY.model_copy(update={"seq_length_tokens": 64})
    layouts = dataset_layouts(
        config, ("packed", "bucketed", "padded"), patterned_dataset, 2048
    )
    packed, bucketed, padded = layouts.values()
    assert packed.global_batch_size < padded.global_batch_size
    assert bucketed.non_padding_share is None
    assert 0 < padded.non_padding_share < packed.non_padding_share <= 1
    assert (padded.computed_share, packed.computed_share) == (1.0, 1.0)
    assert bucketed.computed_share < 1
