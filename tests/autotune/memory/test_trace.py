"""Compare traced memory with the CPU allocator's own account of real steps.

Memory of a GPU is checked for how it differs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, islice

import pytest
import torch
from torch.optim import optimizer

from autotune.memory.decide.memory_model import fit_memory_model
from autotune.memory.jobs import trace as trace_job
from autotune.memory.jobs.trace import trace_steps
from autotune.memory.values import Term, Trace
from testbed.simulators.allocator import SPECIAL_IDS, Case, allocator_peak_bytes
from trainer.config.train_config import TrainConfig
from trainer.model import precision

LAYERS = 2
HIDDEN = 64
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "intermediate_size": 256,
}
BASE = Case(family="bert", dropout=0.0, vocab_size=512, rows=8, width=64, shape=SHAPE)
CASES = [
    BASE,
    replace(BASE, dropout=0.1, vocab_size=8000),
    replace(BASE, dropout=0.1, settings={"precision": "bf16"}),
    replace(BASE, settings={"activation_checkpointing": "full"}),
    replace(
        BASE,
        dropout=0.1,
        settings={"activation_checkpointing": "selective", "precision": "bf16"},
    ),
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


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: real steps are so small that threads would mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def traced(case: Case, *, ranks: int = 1, **changes: object) -> Trace:
    config = TrainConfig.model_validate(case.config.model_dump() | changes)
    documents = case.documents_per_sequence
    return trace_steps(
        config,
        case.vocab_size,
        SPECIAL_IDS,
        documents_per_sequence=documents,
        ranks=ranks,
    )[0]


def sizes_of(trace: Trace) -> Iterator[tuple[str, int]]:
    """Yield the term and bytes of every event; bytes of a release are negative."""
    for event in trace.events:
        is_made = event >= 0
        allocation = trace.allocations[event if is_made else -1 - event]
        size_bytes = allocation.size_bytes
        yield allocation.term, size_bytes if is_made else -size_bytes


def running_bytes(trace: Trace) -> list[int]:
    return list(accumulate(size for _, size in sizes_of(trace)))


def peak_of(trace: Trace) -> int:
    return max(running_bytes(trace))


def terms_after(trace: Trace, events: int) -> Counter[str]:
    terms: Counter[str] = Counter()
    for term, size_bytes in islice(sizes_of(trace), events):
        terms[term] += size_bytes
    return terms


def terms_at_peak(trace: Trace) -> Counter[str]:
    return terms_after(trace, running_bytes(trace).index(peak_of(trace)) + 1)


def between_steps(trace: Trace) -> Counter[str]:
    """Return the bytes in use after the first step, before the second begins."""
    return terms_after(trace, trace.repeats_from)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traced_peak_is_that_of_the_cpu_allocator(case):
    assert peak_of(traced(case)) == pytest.approx(allocator_peak_bytes(case), rel=0.02)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda", "precision": "bf16"},
        {
            "device": "cuda",
            "precision": "bf16",
            "activation_checkpointing": "selective",
        },
    ],
    ids=str,
)
def test_size_between_traces_is_predicted(family, settings):
    case = replace(BASE, family=family, documents_per_sequence=3.0)

    def trace_size(size: int) -> Trace:
        return traced(
            case, micro_batch_size=size, global_batch_size=2 * size, **settings
        )

    model = fit_memory_model([trace_size(40), trace_size(80)])
    assert model is not None
    trace = trace_size(61)
    assert tuple(model.events) == trace.events
    assert max(model.running_bytes(61)) == pytest.approx(peak_of(trace), rel=0.01)


def test_ddp_keeps_gradient_buckets_between_steps():
    alone, among = (
        between_steps(traced(BASE, ranks=ranks, global_batch_size=BASE.rows * ranks))
        for ranks in (1, 2)
    )
    assert alone[Term.GRADIENTS] == 0
    # The optimizer keeps two numbers for each weight, and a count of steps for each
    # tensor.
    assert among[Term.GRADIENTS] == pytest.approx(alone[Term.OPTIMIZER] / 2, rel=0.001)
    assert among - Counter({Term.GRADIENTS: among[Term.GRADIENTS]}) == alone


def test_gradients_without_bucket_views_exist_twice():
    def max_gradient_bytes(view: bool) -> int:
        trace = traced(
            BASE,
            ranks=2,
            global_batch_size=2 * BASE.rows,
            parallel={"gradient_as_bucket_view": view},
        )
        return max(
            accumulate(size for term, size in sizes_of(trace) if term == Term.GRADIENTS)
        )

    once = between_steps(traced(BASE))[Term.OPTIMIZER] / 2
    assert max_gradient_bytes(view=False) == pytest.approx(2 * once, rel=0.01)
    assert once < max_gradient_bytes(view=True) < 1.5 * once


def test_dropout_mask_takes_a_byte_on_gpu():
    case = replace(BASE, dropout=0.1)
    on_cpu, on_gpu = (
        traced(case, device=device, attention="sdpa", compile=False)
        for device in ("cpu", "cuda")
    )
    # After the embeddings and twice in each layer, the last of which computes the
    # positions to predict alone.
    numbers = HIDDEN * (
        case.rows * case.width * (1 + 2 * (LAYERS - 1)) + 2 * on_cpu.predicted_tokens
    )
    term = "activations: Dropout"
    assert terms_at_peak(on_cpu)[term] - terms_at_peak(on_gpu)[term] == 3 * numbers


def test_further_steps_end_as_they_begin():
    trace = traced(BASE)
    # And divisor of the optimizer, which the first step makes.
    kept = Counter({Term.TEMPORARIES: 2 * 4})
    assert terms_after(trace, len(trace.events)) - between_steps(trace) == kept
    terms = terms_at_peak(trace)
    assert terms[Term.OPTIMIZER] == pytest.approx(2 * terms[Term.PARAMETERS], rel=0.02)


def test_only_live_allocations_are_released():
    live: set[int] = set()
    for event in traced(CASES[4]).events:
        if event >= 0:
            assert event not in live
            live.add(event)
        else:
            live.remove(-1 - event)


def test_job_traces_every_requested_size():
    supported = optimizer._get_fused_kernels_supported_devices
    measured = {
        "config": (
            BASE.config.model_dump(mode="json")
            | {
                "device": "cuda",
                "precision": "bf16",
            }
        ),
        "vocab_size": 512,
        "special_ids": SPECIAL_IDS.model_dump(),
        "sizes": [2, 5],
        "micro_batches": 3,
        "documents_per_sequence": 2.0,
        "ranks": 2,
    }
    figures = trace_job.run(measured, {})
    traces = [Trace.of(trace) for trace in figures["traces"]]
    assert [trace.micro_batch_size for trace in traces] == [2, 5]
    assert [trace.to_json() for trace in traces] == figures["traces"]
    assert figures["attention"] == "varlen"
    assert figures["parameters"] > 100_000
    # Torch is left as it was.
    assert optimizer._get_fused_kernels_supported_devices is supported
    assert torch.empty(2).device.type == "cpu"


GPU = {"device": "cuda", "precision": "bf16", "attention": "varlen"}
DEEP = replace(BASE, rows=64, shape=SHAPE | {"num_hidden_layers": 6})


def test_compiled_layers_keep_fewer_activations():
    def kept(**settings: object) -> int:
        terms = terms_at_peak(traced(DEEP, **GPU, **settings))
        return sum(
            size for term, size in terms.items() if term.startswith("activations")
        )

    eager, compiled = (
        {
            kind: kept(activation_checkpointing=kind, compile=compiles)
            for kind in ("none", "full")
        }
        for compiles in (False, True)
    )
    assert 0.5 * eager["none"] < compiled["none"] < eager["none"]
    assert compiled["full"] < 0.4 * compiled["none"]
    assert compiled["full"] < eager["full"]


def test_fused_loss_holds_no_logits(monkeypatch):
    monkeypatch.setattr(precision, "find_spec", lambda name: True)

    def trace_size(size: int, *, fused: bool) -> Trace:
        settings = GPU | {
            "micro_batch_size": size,
            "global_batch_size": size,
            "fused_cross_entropy": fused,
        }
        return traced(replace(BASE, vocab_size=8000), **settings, compile=False)

    plain = trace_size(400, fused=False)
    fused = trace_size(400, fused=True)
    assert peak_of(fused) < 0.7 * peak_of(plain)
    plain_flops, fused_flops = (
        sum(kernel.flops * count for kernel, count in trace.work.kernels)
        for trace in (plain, fused)
    )
    # It multiplies the same matrices.
    assert fused_flops == pytest.approx(plain_flops)
    assert fit_memory_model([fused, trace_size(800, fused=True)]) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_blocks_end_with_the_step(dropout):
    attention = {"attention": "sdpa"} if dropout else {}
    trace = traced(
        replace(DEEP, dropout=dropout),
        **GPU | attention,
        activation_checkpointing="full",
        compile=True,
    )
    assert (
        sum((terms_after(trace, len(trace.events)) - between_steps(trace)).values())
        <= 8
    )


def test_fsdp2_rank_holds_half_of_the_state():
    alone, among = (
        traced(
            BASE,
            ranks=ranks,
            global_batch_size=ranks * BASE.rows,
            **GPU,
            parallel={"strategy": "fsdp2"},
        )
        for ranks in (1, 2)
    )
    for term in (Term.PARAMETERS, Term.OPTIMIZER):
        assert between_steps(among)[term] == pytest.approx(
            between_steps(alone)[term] / 2, rel=0.02
        )
    assert {allocation.stream for allocation in alone.allocations} == {0}
    assert {allocation.stream for allocation in among.allocations} == {0, 1, 2}
    released = {-1 - event for event in among.events if event < 0}
    for number, allocation in enumerate(among.allocations):
        if allocation.stream:
            assert number in released


def test_first_bucket_is_followed_by_smaller_ones():
    large = replace(
        BASE,
        vocab_size=8000,
        shape=SHAPE | {"num_hidden_layers": 6, "hidden_size": 128},
    )
    trace = traced(
        large, ranks=2, global_batch_size=2 * large.rows, parallel={"bucket_cap_mib": 1}
    )
    everything = pytest.approx(between_steps(trace)[Term.OPTIMIZER] / 2, rel=0.01)
    gradients_bytes = [
        allocation.size_bytes
        for allocation in trace.allocations
        if allocation.term == Term.GRADIENTS
    ]
    assert max(gradients_bytes) == everything
    assert between_steps(trace)[Term.GRADIENTS] == everything
    sizes_bytes = [allocation.size_bytes for allocation in trace.allocations]
    assert sizes_bytes.index(max(sizes_bytes)) < len(sizes_bytes) / 2
