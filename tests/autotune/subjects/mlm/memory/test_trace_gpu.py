"""Traced memory of steps on a GPU: compiled layers and the fused loss.

Traces are compared with each other, so that the tests need no GPU.
"""

import functools
from dataclasses import replace

import pytest

from autotune.memory.decide.memory_model import fit_memory_model
from autotune.memory.values import Trace
from tests.autotune.subjects.mlm.memory.traced_steps import (
    BASE,
    GPU,
    NUMBERS_LEFT_BYTES,
    SHAPE,
    left_by_last_step,
    peak_of,
    terms_at_peak,
    traced,
)
from trainer.model import requirements

DEEP = replace(BASE, rows=64, shape=SHAPE | {"num_hidden_layers": 6})


@functools.cache
def kept_bytes(checkpointing: str, *, compiled: bool) -> int:
    """Return the bytes of activations at the peak of a deep model."""
    settings = GPU | {"activation_checkpointing": checkpointing}
    terms = terms_at_peak(traced(DEEP, **settings, compile=compiled))
    return sum(
        size_bytes
        for term, size_bytes in terms.items()
        if term.startswith("activations")
    )


def test_compiled_layers_keep_fewer_activations():
    eager = kept_bytes("none", compiled=False)
    # Inputs of matmuls and attention, which are most of the activations, stay.
    assert 0.5 * eager < kept_bytes("none", compiled=True) < eager


def test_checkpointed_compiled_layers_keep_fewer_activations():
    checkpointed = kept_bytes("full", compiled=True)
    # Each layer keeps its input only, and the layer in backward is recomputed.
    assert checkpointed < 0.4 * kept_bytes("none", compiled=True)
    assert checkpointed < kept_bytes("full", compiled=False)


def kernel_flops(trace: Trace) -> float:
    """Return the FLOPs of all kernels of a step."""
    return sum(kernel.flops * count for kernel, count in trace.work.kernels)


@functools.cache
def long_documents(attention: str, *, compiled: bool) -> Trace:
    """Return the trace of a step whose sequences are nearly one document each."""
    case = replace(BASE, rows=8, width=512, documents_per_sequence=1.0)
    return traced(case, **GPU | {"attention": attention, "compile": compiled})


@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_4_is_traced_as_varlen(compiled):
    varlen = long_documents("varlen", compiled=compiled)
    fa4 = long_documents("fa4", compiled=compiled)
    assert kernel_flops(fa4) == pytest.approx(kernel_flops(varlen), rel=1e-6)
    attention = {
        kernel.name for kernel, _ in fa4.work.kernels if kernel.kind == "attention"
    }
    assert attention == {"FA4 forward", "FA4 backward"}
    # Both keep queries, keys, values, result and log-sum-exp for backward.
    kept = [
        sum(
            size_bytes
            for term, size_bytes in terms_at_peak(trace).items()
            if term.startswith("activations")
        )
        for trace in (varlen, fa4)
    ]
    assert kept[1] == pytest.approx(kept[0], rel=0.01)


def trace_large_head(*, fused: bool, micro_batch_size: int = 400) -> Trace:
    """Trace a model with a large head, as if liger-kernel is installed."""
    case = replace(BASE, vocab_size=8000)
    settings = GPU | {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size,
        "fused_cross_entropy": fused,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(requirements, "find_spec", lambda name: True)
        return traced(case, **settings, compile=False)


@pytest.fixture(scope="module")
def trace_of_fused_loss() -> Trace:
    return trace_large_head(fused=True)


@pytest.fixture(scope="module")
def trace_of_logits() -> Trace:
    """Trace of the same model, whose head computes logits."""
    return trace_large_head(fused=False)


def test_fused_loss_holds_no_logits(trace_of_fused_loss, trace_of_logits):
    # Logits are the largest block of this model.
    assert peak_of(trace_of_fused_loss) < 0.7 * peak_of(trace_of_logits)


def test_fused_loss_multiplies_the_same_matrices(trace_of_fused_loss, trace_of_logits):
    expected_flops = kernel_flops(trace_of_logits)
    assert kernel_flops(trace_of_fused_loss) == pytest.approx(expected_flops)


def test_fused_loss_has_equal_events_at_any_size(trace_of_fused_loss):
    larger = trace_large_head(fused=True, micro_batch_size=800)
    assert fit_memory_model([trace_of_fused_loss, larger]) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_blocks_end_with_the_step(dropout):
    settings = GPU | {"activation_checkpointing": "full"}
    if dropout:
        # varlen attention has no dropout.
        settings["attention"] = "sdpa"
    trace = traced(replace(DEEP, dropout=dropout), **settings, compile=True)
    assert left_by_last_step(trace).total() <= NUMBERS_LEFT_BYTES


@functools.cache
def trace_norms(*, fused: bool, compiled: bool, micro_batch_size: int = 64) -> Trace:
    settings = GPU | {
        "attention": "sdpa",  # varlen attention has no dropout
        "fused_norms": fused,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size,
    }
    return traced(replace(DEEP, dropout=0.1), **settings, compile=compiled)


@pytest.mark.parametrize("compiled", [False, True])
class TestFusedNorms:
    def test_have_equal_events_at_any_size(self, compiled):
        traces = [
            trace_norms(fused=True, compiled=compiled, micro_batch_size=size)
            for size in (64, 128)
        ]
        assert fit_memory_model(traces) is not None

    def test_move_fewer_bytes(self, compiled):
        fused, plain = (
            trace_norms(fused=fused, compiled=compiled).work for fused in (True, False)
        )
        moving = ("copy", "norm", "random")
        assert fused.bytes_of(*moving) < plain.bytes_of(*moving)

    def test_multiply_the_same_matrices(self, compiled):
        fused, plain = (
            trace_norms(fused=fused, compiled=compiled) for fused in (True, False)
        )
        assert kernel_flops(fused) == pytest.approx(kernel_flops(plain))


def test_fused_norms_keep_fewer_activations():
    # Eager layers keep the projection's sum and the result in fp32, and a mask.
    assert peak_of(trace_norms(fused=True, compiled=False)) < peak_of(
        trace_norms(fused=False, compiled=False)
    )


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_fused_norms_are_recomputed(checkpointing):
    settings = GPU | {"attention": "sdpa", "activation_checkpointing": checkpointing}
    case = replace(DEEP, dropout=0.1)
    for compiled in (False, True):
        fused, plain = (
            peak_of(traced(case, **settings, compile=compiled, fused_norms=fused))
            for fused in (True, False)
        )
        assert fused < 1.05 * plain


@functools.cache
def trace_mlp(*, epilogues: bool, compiled: bool, micro_batch_size: int = 64) -> Trace:
    settings = GPU | {
        "gelu_epilogues": epilogues,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size,
    }
    return traced(DEEP, **settings, compile=compiled)


@pytest.mark.parametrize("compiled", [False, True])
class TestGeluEpilogues:
    def test_have_equal_events_at_any_size(self, compiled):
        traces = [
            trace_mlp(epilogues=True, compiled=compiled, micro_batch_size=size)
            for size in (64, 128)
        ]
        assert fit_memory_model(traces) is not None

    def test_multiply_the_same_matrices(self, compiled):
        fused, plain = (
            trace_mlp(epilogues=epilogues, compiled=compiled)
            for epilogues in (True, False)
        )
        assert kernel_flops(fused) == pytest.approx(kernel_flops(plain))

    def test_compute_gelu_in_matmuls(self, compiled):
        fused, plain = (
            trace_mlp(epilogues=epilogues, compiled=compiled).work
            for epilogues in (True, False)
        )
        # The head has the only other GELU.
        assert fused.bytes_of("math") < 0.5 * plain.bytes_of("math")

    def test_keep_fewer_activations(self, compiled):
        fused, plain = (
            peak_of(trace_mlp(epilogues=epilogues, compiled=compiled))
            for epilogues in (True, False)
        )
        assert fused < plain
