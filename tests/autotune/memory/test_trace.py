"""Traced memory against the CPU allocator's own account of real steps, and what a GPU
would do differently."""

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

LAYERS, HIDDEN = 2, 64
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
    """Real steps are so small here that threads would mostly wait for each other."""
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
    """The term and bytes of every event, below zero for what is released."""
    for event in trace.events:
        one = trace.allocations[event if event >= 0 else -1 - event]
        yield one.term, one.size_bytes if event >= 0 else -one.size_bytes


def running_bytes(trace: Trace) -> list[int]:
    return list(accumulate(size for _, size in sizes_of(trace)))


def peak_of(trace: Trace) -> int:
    return max(running_bytes(trace))


def terms_after(trace: Trace, events: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for term, size in islice(sizes_of(trace), events):
        found[term] += size
    return found


def terms_at_peak(trace: Trace) -> Counter[str]:
    return terms_after(trace, running_bytes(trace).index(peak_of(trace)) + 1)


def between_steps(trace: Trace) -> Counter[str]:
    """Bytes in use after the first step, before the second begins."""
    return terms_after(trace, trace.repeats_from)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_traced_peak_is_that_of_the_cpus_allocator(case):
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
def test_a_size_between_two_traced_ones_is_predicted_within_a_hundredth(
    family, settings
):
    case = replace(BASE, family=family, documents_per_sequence=3.0)

    def at(rows: int) -> Trace:
        return traced(
            case, micro_batch_size=rows, global_batch_size=2 * rows, **settings
        )

    fit = fit_memory_model([at(rows) for rows in (40, 80)])
    assert fit is not None
    trace = at(61)
    assert tuple(fit.events) == trace.events
    assert max(fit.running_bytes(61)) == pytest.approx(peak_of(trace), rel=0.01)


def test_a_rank_among_others_keeps_buckets_of_all_gradients_between_steps():
    alone, among = (
        between_steps(traced(BASE, ranks=ranks, global_batch_size=BASE.rows * ranks))
        for ranks in (1, 2)
    )
    assert alone[Term.GRADIENTS] == 0
    # The optimizer keeps two numbers for each weight, and a count of steps for each
    # tensor.
    assert among[Term.GRADIENTS] == pytest.approx(alone[Term.OPTIMIZER] / 2, rel=0.001)
    assert among - Counter({Term.GRADIENTS: among[Term.GRADIENTS]}) == alone


def test_gradients_that_are_no_views_of_buckets_exist_twice():
    def most_bytes(view: bool) -> int:
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
    assert most_bytes(view=False) == pytest.approx(2 * once, rel=0.01)
    assert once < most_bytes(view=True) < 1.5 * once


def test_a_dropout_mask_is_a_byte_for_each_number_on_a_gpu_and_four_on_a_cpu():
    case = replace(BASE, dropout=0.1)
    on_cpu, on_gpu = (
        traced(case, device=device, attention="sdpa", compile=False)
        for device in ("cpu", "cuda")
    )
    # After the embeddings and twice in each layer, the last of which computes the
    # places to predict alone.
    numbers = HIDDEN * (
        case.rows * case.width * (1 + 2 * (LAYERS - 1)) + 2 * on_cpu.predicted_tokens
    )
    term = "activations: Dropout"
    assert terms_at_peak(on_cpu)[term] - terms_at_peak(on_gpu)[term] == 3 * numbers


def test_further_steps_end_with_what_they_began_with_and_nothing_is_released_that_was_not_made_or_twice():
    trace = traced(BASE)
    # And divisor of the optimizer, which the first step makes.
    flag = Counter({Term.TEMPORARIES: 2 * 4})
    assert terms_after(trace, len(trace.events)) - between_steps(trace) == flag
    terms = terms_at_peak(trace)
    assert terms[Term.OPTIMIZER] == pytest.approx(2 * terms[Term.PARAMETERS], rel=0.02)
    live: set[int] = set()
    for event in traced(CASES[4]).events:
        if event >= 0:
            assert event not in live
            live.add(event)
        else:
            live.remove(-1 - event)


def test_a_job_traces_every_size_that_it_is_asked_for_says_what_the_model_is_and_leaves_torch_as_it_was():
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
    found = trace_job.run(measured, {})
    traces = [Trace.of(one) for one in found["traces"]]
    assert [one.micro_batch_size for one in traces] == [2, 5]
    assert [one.to_json() for one in traces] == found["traces"]
    assert found["attention"] == "varlen"
    assert found["parameters"] > 100_000
    assert optimizer._get_fused_kernels_supported_devices is supported
    assert torch.empty(2).device.type == "cpu"


GPU = {"device": "cuda", "precision": "bf16", "attention": "varlen"}
DEEP = replace(BASE, rows=64, shape=SHAPE | {"num_hidden_layers": 6})


def test_compiled_layers_keep_less_and_much_less_with_checkpointing():
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


def test_a_fused_loss_multiplies_the_same_matrices_and_holds_no_logits(monkeypatch):
    monkeypatch.setattr(precision, "find_spec", lambda name: True)

    def at(rows: int, *, fused: bool) -> Trace:
        settings = GPU | {
            "micro_batch_size": rows,
            "global_batch_size": rows,
            "fused_cross_entropy": fused,
        }
        return traced(replace(BASE, vocab_size=8000), **settings, compile=False)

    plain, fused = (at(400, fused=one) for one in (False, True))
    assert peak_of(fused) < 0.7 * peak_of(plain)
    flops, others = (
        sum(one.flops * count for one, count in trace.work.kernels)
        for trace in (plain, fused)
    )
    assert others == pytest.approx(flops)
    assert fit_memory_model([fused, at(800, fused=True)]) is not None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_of_compiled_layers_end_with_the_step(dropout):
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


def test_a_sharded_rank_holds_half_of_the_state_and_sends_from_streams_of_its_own():
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
    assert {one.stream for one in alone.allocations} == {0}
    assert {one.stream for one in among.allocations} == {0, 1, 2}
    released = {-1 - event for event in among.events if event < 0}
    assert all(
        number in released for number, one in enumerate(among.allocations) if one.stream
    )


def test_one_bucket_of_all_gradients_is_followed_by_smaller_ones():
    large = replace(
        BASE,
        vocab_size=8000,
        shape=SHAPE | {"num_hidden_layers": 6, "hidden_size": 128},
    )
    trace = traced(
        large, ranks=2, global_batch_size=2 * large.rows, parallel={"bucket_cap_mib": 1}
    )
    everything = pytest.approx(between_steps(trace)[Term.OPTIMIZER] / 2, rel=0.01)
    assert (
        max(one.size_bytes for one in trace.allocations if one.term == Term.GRADIENTS)
        == everything
    )
    assert between_steps(trace)[Term.GRADIENTS] == everything
    assert (
        trace.allocations.index(max(trace.allocations, key=lambda one: one.size_bytes))
        < len(trace.allocations) / 2
    )
