"""Traced memory, compared with the CPU allocator's own account of real steps.

Traces of a GPU are compared with those of a CPU, as the tests need no GPU.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import pytest
import torch
from torch.optim import optimizer

from autotune.memory.decide.memory_model import fit_memory_model
from autotune.memory.jobs import trace as trace_job
from autotune.memory.jobs.trace import trace_steps
from autotune.memory.values import Term, Trace
from testbed.simulators.allocator import SPECIAL_IDS, Case, allocator_peak_bytes
from trainer.config.train_config import TrainConfig
from trainer.model import requirements

LAYERS = 2
HIDDEN = 64
INTERMEDIATE = 256
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "intermediate_size": INTERMEDIATE,
}
BASE = Case(family="bert", dropout=0.0, vocab_size=512, rows=8, width=64, shape=SHAPE)
SELECTIVE_BF16 = replace(
    BASE,
    dropout=0.1,
    settings={"activation_checkpointing": "selective", "precision": "bf16"},
)
CASES = [
    BASE,
    replace(BASE, dropout=0.1, vocab_size=8000),
    replace(BASE, dropout=0.1, settings={"precision": "bf16"}),
    replace(BASE, settings={"activation_checkpointing": "full"}),
    SELECTIVE_BF16,
    replace(BASE, dropout=0.1, settings={"layout": "padded"}),
    replace(BASE, settings={"mlm_head": "dense", "last_layer": "dense"}),
    replace(BASE, micro_batches=2, documents_per_sequence=3.0),
    replace(BASE, rows=4, width=32, dropout=0.1),
    replace(BASE, family="roberta", dropout=0.1),
    replace(BASE, family="electra", dropout=0.1, settings={"layout": "padded"}),
    replace(BASE, family="modernbert"),
    replace(
        BASE,
        family="modernbert",
        dropout=0.1,
        settings={"activation_checkpointing": "full", "precision": "bf16"},
    ),
]
TWO_RANKS = {"ranks": 2, "global_batch_size": 2 * BASE.rows}
"""Changes by which each of two ranks takes the steps of one."""
GPU = {"device": "cuda", "precision": "bf16", "attention": "varlen"}
DEEP = replace(BASE, rows=64, shape=SHAPE | {"num_hidden_layers": 6})
JOB_SIZES = [2, 5]
NUMBERS_LEFT_BYTES = 2 * 4
"""Bytes of two fp32 numbers that a step leaves to the next, such as the divisor by
which the optimizer clips gradients."""


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: real steps are so small that threads would mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def traced(case: Case, *, ranks: int = 1, **changes: object) -> Trace:
    """Return the trace of a case whose settings have some changes."""
    config = TrainConfig.model_validate(case.config.model_dump() | changes)
    steps = trace_steps(
        config,
        case.vocab_size,
        SPECIAL_IDS,
        documents_per_sequence=case.documents_per_sequence,
        ranks=ranks,
    )
    return steps.trace


def changes_of(trace: Trace) -> Iterator[tuple[str, int]]:
    """Yield the term and bytes of every event; bytes of a release are negative."""
    for event in trace.events:
        if event >= 0:
            allocation = trace.allocations[event]
            yield allocation.term, allocation.size_bytes
        else:
            allocation = trace.allocations[-1 - event]
            yield allocation.term, -allocation.size_bytes


def running_bytes(trace: Trace) -> list[int]:
    """Return the bytes in use after each event."""
    return list(accumulate(size_bytes for _, size_bytes in changes_of(trace)))


def peak_of(trace: Trace) -> int:
    return max(running_bytes(trace))


def terms_after(trace: Trace, events: int) -> Counter[str]:
    """Return the bytes in use after the first events, by term."""
    terms_bytes: Counter[str] = Counter()
    for term, size_bytes in islice(changes_of(trace), events):
        terms_bytes[term] += size_bytes
    return terms_bytes


def terms_at_peak(trace: Trace) -> Counter[str]:
    return terms_after(trace, running_bytes(trace).index(peak_of(trace)) + 1)


def between_steps(trace: Trace) -> Counter[str]:
    """Return the bytes in use before the last step, by term."""
    return terms_after(trace, trace.repeats_from)


def left_by_last_step(trace: Trace) -> Counter[str]:
    """Return the bytes in use after the last step that were not before it, by term."""
    return terms_after(trace, len(trace.events)) - between_steps(trace)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traced_peak_is_that_of_the_cpu_allocator(case):
    # Kernels of a CPU also allocate workspaces, of which a trace has only copies to a
    # wider dtype.
    assert peak_of(traced(case)) == pytest.approx(allocator_peak_bytes(case), rel=0.02)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"device": "cpu"}, id="cpu"),
        pytest.param({"device": "cuda"}, id="cuda"),
        pytest.param({"device": "cuda", "precision": "bf16"}, id="cuda, bf16"),
        pytest.param(
            {
                "device": "cuda",
                "precision": "bf16",
                "activation_checkpointing": "selective",
            },
            id="cuda, bf16, selective checkpointing",
        ),
    ],
)
def test_size_between_traces_is_predicted(family, settings):
    case = replace(BASE, family=family, documents_per_sequence=3.0)

    def trace_size(size: int) -> Trace:
        return traced(
            case, micro_batch_size=size, global_batch_size=2 * size, **settings
        )

    memory_model = fit_memory_model([trace_size(40), trace_size(80)])
    assert memory_model is not None
    trace = trace_size(61)
    assert tuple(memory_model.events) == trace.events
    predicted_bytes = max(memory_model.running_bytes(61))
    # Not exactly: numbers of slots are rounded up, which a line between sizes is not.
    assert predicted_bytes == pytest.approx(peak_of(trace), rel=0.01)


def weights_bytes(terms_bytes: Counter[str]) -> float:
    """Return the bytes of all trained weights in fp32, by those of the optimizer.

    It keeps two numbers for each weight. The counts of steps, a number for each tensor,
    make the figure too large by less than 0.1 %.
    """
    return terms_bytes[Term.OPTIMIZER] / 2


def test_ddp_keeps_gradient_buckets_between_steps():
    one_rank = between_steps(traced(BASE))
    two_ranks = between_steps(traced(BASE, **TWO_RANKS))
    assert one_rank[Term.GRADIENTS] == 0
    assert two_ranks[Term.GRADIENTS] == pytest.approx(
        weights_bytes(one_rank), rel=0.001
    )
    del two_ranks[Term.GRADIENTS]
    assert two_ranks == one_rank


def max_gradient_bytes(*, as_views: bool) -> int:
    """Return the most bytes of gradients in DDP, which may be views of its buckets."""
    trace = traced(BASE, **TWO_RANKS, parallel={"gradient_as_bucket_view": as_views})
    gradients_bytes = (
        size_bytes for term, size_bytes in changes_of(trace) if term == Term.GRADIENTS
    )
    return max(accumulate(gradients_bytes))


def test_gradients_without_bucket_views_exist_twice():
    once = weights_bytes(between_steps(traced(BASE)))
    assert max_gradient_bytes(as_views=False) == pytest.approx(2 * once, rel=0.01)


def test_gradients_with_bucket_views_exist_once():
    once = weights_bytes(between_steps(traced(BASE)))
    # A gradient exists beside its bucket until it becomes a view; the largest one, of
    # the embeddings, is less than half of all.
    assert once < max_gradient_bytes(as_views=True) < 1.5 * once


def test_dropout_mask_takes_a_byte_on_gpu():
    case = replace(BASE, dropout=0.1)
    on_cpu = traced(case, device="cpu", attention="sdpa", compile=False)
    on_gpu = traced(case, device="cuda", attention="sdpa", compile=False)
    # After the embeddings and twice in each layer; the last layer computes only the
    # positions to predict.
    positions = case.rows * case.width * (1 + 2 * (LAYERS - 1))
    positions += 2 * on_cpu.predicted_tokens
    numbers = HIDDEN * positions
    term = "activations: Dropout"
    # A CPU keeps 4 bytes of each number.
    assert terms_at_peak(on_cpu)[term] - terms_at_peak(on_gpu)[term] == 3 * numbers


def test_further_steps_end_as_they_begin():
    numbers = Counter({Term.TEMPORARIES: NUMBERS_LEFT_BYTES})
    assert left_by_last_step(traced(BASE)) == numbers


def test_optimizer_state_is_twice_the_parameters():
    terms = terms_at_peak(traced(BASE))
    # Buffers count as parameters, and the optimizer also counts the steps.
    assert terms[Term.OPTIMIZER] == pytest.approx(2 * terms[Term.PARAMETERS], rel=0.02)


def test_only_live_allocations_are_released():
    live: set[int] = set()
    for event in traced(SELECTIVE_BF16).events:
        if event >= 0:
            assert event not in live
            live.add(event)
        else:
            live.remove(-1 - event)


def run_job() -> dict[str, Any]:
    """Return the figures of a job that traces two sizes on one of two GPUs."""
    config = BASE.config.model_dump(mode="json")
    request = {
        "config": config | {"device": "cuda", "precision": "bf16"},
        "vocab_size": BASE.vocab_size,
        "special_ids": SPECIAL_IDS.model_dump(),
        "sizes": JOB_SIZES,
        "micro_batches": 3,
        "documents_per_sequence": 2.0,
        "ranks": 2,
    }
    return trace_job.run(request, {})


def test_job_traces_every_requested_size():
    traces = run_job()["traces"]
    assert [Trace.of(trace).micro_batch_size for trace in traces] == JOB_SIZES
    # The trace in the trial log is the whole trace.
    assert [Trace.of(trace).to_json() for trace in traces] == traces


def test_job_describes_the_model():
    figures = run_job()
    assert figures["attention"] == "varlen"
    # These and a few more: positions, biases and layer norms.
    attention_weights = 4 * HIDDEN**2
    mlp_weights = 2 * HIDDEN * INTERMEDIATE
    weights = BASE.vocab_size * HIDDEN + LAYERS * (attention_weights + mlp_weights)
    assert weights < figures["parameters"] < 1.5 * weights


def test_job_leaves_torch_as_it_was():
    supported_devices = optimizer._get_fused_kernels_supported_devices
    run_job()
    assert optimizer._get_fused_kernels_supported_devices is supported_devices
    assert torch.empty(2).device.type == "cpu"


def kept_bytes(checkpointing: str, *, compiled: bool) -> int:
    """Return the bytes of activations at the peak of a deep model on a GPU."""
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
    return sum(kernel.flops * count for kernel, count in trace.work.kernels)


@pytest.fixture
def trace_loss(monkeypatch):
    """Return a function that traces a large head, as if liger-kernel is installed."""
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)

    def trace(*, fused: bool, size: int = 400) -> Trace:
        settings = GPU | {
            "micro_batch_size": size,
            "global_batch_size": size,
            "fused_cross_entropy": fused,
        }
        return traced(replace(BASE, vocab_size=8000), **settings, compile=False)

    return trace


def test_fused_loss_holds_no_logits(trace_loss):
    # Logits are the largest block of this model.
    assert peak_of(trace_loss(fused=True)) < 0.7 * peak_of(trace_loss(fused=False))


def test_fused_loss_multiplies_the_same_matrices(trace_loss):
    fused = kernel_flops(trace_loss(fused=True))
    assert fused == pytest.approx(kernel_flops(trace_loss(fused=False)))


def test_fused_loss_has_equal_events_at_any_size(trace_loss):
    traces = [trace_loss(fused=True, size=size) for size in (400, 800)]
    assert fit_memory_model(traces) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_blocks_end_with_the_step(dropout):
    settings = GPU | {"activation_checkpointing": "full"}
    if dropout:
        # varlen attention has no dropout.
        settings["attention"] = "sdpa"
    trace = traced(replace(DEEP, dropout=dropout), **settings, compile=True)
    assert left_by_last_step(trace).total() <= NUMBERS_LEFT_BYTES


def trace_fsdp2(ranks: int) -> Trace:
    return traced(
        BASE,
        ranks=ranks,
        global_batch_size=ranks * BASE.rows,
        **GPU,
        parallel={"strategy": "fsdp2"},
    )


@pytest.mark.parametrize("term", [Term.PARAMETERS, Term.OPTIMIZER])
def test_fsdp2_rank_holds_half_of_the_state(term):
    one_rank = between_steps(trace_fsdp2(1))
    two_ranks = between_steps(trace_fsdp2(2))
    # Shards are rounded up, and buffers and counts of steps are not sharded.
    assert two_ranks[term] == pytest.approx(one_rank[term] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "streams"),
    [
        pytest.param(1, {0}, id="one rank computes only"),
        pytest.param(2, {0, 1, 2}, id="two ranks also gather and reduce"),
    ],
)
def test_fsdp2_communicates_on_streams_of_its_own(ranks, streams):
    trace = trace_fsdp2(ranks)
    assert {allocation.stream for allocation in trace.allocations} == streams


def test_fsdp2_releases_blocks_of_communication():
    trace = trace_fsdp2(2)
    released = {-1 - event for event in trace.events if event < 0}
    for number, allocation in enumerate(trace.allocations):
        if allocation.stream:
            assert number in released


@pytest.fixture(scope="module")
def trace_with_small_buckets():
    """Return the trace of a model whose gradients fill many buckets."""
    large = replace(
        BASE,
        vocab_size=8000,
        shape=SHAPE | {"num_hidden_layers": 6, "hidden_size": 128},
    )
    return traced(large, **TWO_RANKS, parallel={"bucket_cap_mib": 1})


def test_first_bucket_holds_all_gradients(trace_with_small_buckets):
    trace = trace_with_small_buckets
    gradients_bytes = [
        allocation.size_bytes
        for allocation in trace.allocations
        if allocation.term == Term.GRADIENTS
    ]
    all_gradients = weights_bytes(between_steps(trace))
    assert max(gradients_bytes) == pytest.approx(all_gradients, rel=0.01)
    # It is made before the first step, and so in the first half of the allocations.
    sizes_bytes = [allocation.size_bytes for allocation in trace.allocations]
    assert sizes_bytes.index(max(sizes_bytes)) < len(sizes_bytes) / 2


def test_smaller_buckets_replace_the_first(trace_with_small_buckets):
    between = between_steps(trace_with_small_buckets)
    # The first bucket alone is as large, so it is released.
    assert between[Term.GRADIENTS] == pytest.approx(weights_bytes(between), rel=0.01)
