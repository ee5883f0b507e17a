"""Traced memory, compared with the CPU allocator's own account of real steps."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from autotune.memory.decide.memory_model import fit_memory_model
from autotune.memory.values import Term, Trace
from testbed.simulators.allocator import allocator_peak_bytes
from tests.autotune.subjects.mlm.memory.traced_steps import (
    BASE,
    HIDDEN,
    LAYERS,
    NUMBERS_LEFT_BYTES,
    left_by_last_step,
    peak_of,
    terms_at_peak,
    traced,
)
from trainer.data.head_slots import head_slots
from trainer.formats.train_config import TrainConfig

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: real steps are so small that threads would mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traced_peak_is_that_of_the_cpu_allocator(case):
    # Kernels of a CPU also allocate workspaces, of which a trace has only copies to a
    # wider dtype.
    assert peak_of(traced(case)) == pytest.approx(allocator_peak_bytes(case), rel=0.02)


# Not RoBERTa, whose layers are BERT's: each case takes three traces of compiled layers.
@pytest.mark.parametrize("family", ["bert", "modernbert"])
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

    masking_probability = TrainConfig.model_fields["masking_probability"].default

    def slots_of(size: int) -> int:
        return head_slots(size * case.width, masking_probability)

    memory_model = fit_memory_model([trace_size(40), trace_size(80)], slots_of)
    assert memory_model is not None
    trace = trace_size(61)
    assert tuple(memory_model.events) == trace.events
    predicted_bytes = max(memory_model.running_bytes(61))
    # Segments of varlen attention are rounded up, so a line between two sizes is not
    # exact. The sizes of a head are.
    assert predicted_bytes == pytest.approx(peak_of(trace), rel=0.005)
    sizes_bytes = memory_model.sizes_bytes(61).tolist()
    of_head = [
        (allocation.size_bytes, size_bytes)
        for allocation, size_bytes in zip(trace.allocations, sizes_bytes, strict=True)
        if allocation.term == Term.HEAD
    ]
    assert of_head
    assert all(traced_bytes == size_bytes for traced_bytes, size_bytes in of_head)


def test_dropout_mask_takes_a_byte_on_gpu():
    case = replace(BASE, dropout=0.1)
    on_cpu = traced(case, device="cpu", attention="sdpa", compile=False)
    on_gpu = traced(case, device="cuda", attention="sdpa", compile=False)
    # Dropout comes after the embeddings and twice in each layer, of which the last
    # computes only the positions to predict.
    positions = case.rows * case.width * (1 + 2 * (LAYERS - 1))
    positions += 2 * on_cpu.predicted_tokens
    numbers = HIDDEN * positions
    term = "activations: Dropout"
    # A CPU keeps 4 bytes of each number.
    assert terms_at_peak(on_cpu)[term] - terms_at_peak(on_gpu)[term] == 3 * numbers


@pytest.fixture(scope="module")
def base_trace() -> Trace:
    return traced(BASE)


def test_further_steps_end_as_they_begin(base_trace):
    numbers = Counter({Term.TEMPORARIES: NUMBERS_LEFT_BYTES})
    assert left_by_last_step(base_trace) == numbers


def test_optimizer_state_is_twice_the_parameters(base_trace):
    terms = terms_at_peak(base_trace)
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
