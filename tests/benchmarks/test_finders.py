import json
from dataclasses import replace

import pytest

from autotune.memory.size_probe import StepCounts, step_fields
from autotune.memory.values import StepRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Measured
from benchmarks import finders
from benchmarks.finders import (
    Case,
    Found,
    cases,
    find_with_accelerate,
    find_with_lightning,
)
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig

SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
TINY = Case(
    name="tiny",
    config={
        "model": {"name": "tiny", "config": {"model_type": "bert"} | SHAPE},
        "seq_length_tokens": 32,
    },
    vocab_size=1000,
    special_ids={"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
    memory_budget_bytes=64 * 2**20,
)


@pytest.fixture(scope="module")
def fits():
    """Return whether so many sequences fit in a fresh process."""
    with ForkServerMachine() as machine:

        def fits(rows: int) -> bool:
            subject = MlmSubject(
                config=TrainConfig.model_validate(TINY.config_of(rows)),
                vocab_size=TINY.vocab_size,
                special_ids=SpecialIds.model_validate(TINY.special_ids),
            )
            fields = step_fields(
                subject,
                {"micro_batch_size": rows},
                StepCounts(warmup=1, timed=2),
                device="cpu",
                local_ranks=1,
            )
            request = StepRequest(
                **fields, memory_budget_bytes=TINY.memory_budget_bytes
            )
            trial = request.trial(timeout_s=60.0, limit_s=60.0)
            return isinstance(machine.run(trial), Measured)

        yield fits


def _sizes_of_lightning(largest: int) -> list[int]:
    """Return the sizes its search tries if at most so many sequences fit."""
    low = 1
    high = None
    size = 2
    sizes = []
    while True:
        sizes.append(size)
        low, high = (size, high) if size <= largest else (low, size)
        if high is not None and high - low <= 1:
            return sizes
        size = 2 * size if high is None else (low + high) // 2


def _sizes_of_accelerate(largest: int) -> list[int]:
    sizes = [1024]
    while sizes[-1] > largest:
        sizes.append(int(sizes[-1] * 0.9))
    return sizes


@pytest.mark.soak
@pytest.mark.parametrize(
    ("library", "find", "sizes_of"),
    [
        ("lightning", lambda case: find_with_lightning(case, 0.0), _sizes_of_lightning),
        ("accelerate", find_with_accelerate, _sizes_of_accelerate),
    ],
)
def test_tool_finds_a_size_that_fits(fits, library, find, sizes_of):
    pytest.importorskip(library)
    result = find(TINY)
    assert result.note == ""
    assert fits(result.rows)
    sizes = sizes_of(result.rows)
    assert (result.trials, result.refused) == (
        len(sizes),
        sum(size > result.rows for size in sizes),
    )
    assert result.seconds > 0
    if library == "lightning":  # it takes its margin off
        halved = find_with_lightning(replace(TINY, memory_budget_bytes=32 * 2**20), 0.5)
        assert halved.trials in [
            len(sizes_of(largest)) for largest in (2 * halved.rows, 2 * halved.rows + 1)
        ]


def test_answer_without_a_fit_is_marked():
    pytest.importorskip("lightning")
    # The model fits, and two sequences need some 100 MiB.
    wide = {
        "model": {
            "name": "wide",
            "config": {"model_type": "bert"} | SHAPE | {"intermediate_size": 4096},
        }
    }
    config = dict(TINY.config) | wide | {"seq_length_tokens": 512}
    result = find_with_lightning(
        replace(TINY, config=config, memory_budget_bytes=24 * 2**20), 0.0
    )
    # It has not tried one sequence.
    assert (result.rows, result.trials, result.refused) == (1, 1, 1)
    assert result.note == "nothing that it tried fitted"


def test_dead_process_is_no_answer():
    pytest.importorskip("accelerate")
    result = find_with_accelerate(
        replace(TINY, config=dict(TINY.config) | {"seq_length_tokens": 4})
    )
    assert result == Found(
        rows=None, trials=0, refused=0, seconds=result.seconds, note=result.note
    )
    assert result.note.startswith("the process died of exit code 1: ")
    assert "seq_length_tokens" in result.note


WORDS = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "could not create a memory object",
    "std::bad_alloc",
)


@pytest.mark.parametrize("refusal", [*map(RuntimeError, WORDS), MemoryError()], ids=str)
def test_tools_recognise_out_of_memory(refusal):
    memory = pytest.importorskip("accelerate.utils.memory")
    lightning_memory = pytest.importorskip("lightning.pytorch.utilities.memory")
    trials = finders._Trials(counts := [0, 0])
    with pytest.raises(RuntimeError, match="shapes differ"), trials.refusals():
        raise RuntimeError("shapes differ")
    assert counts == [0, 0]
    with pytest.raises(RuntimeError) as raised, trials.refusals():
        raise refusal
    assert memory.should_reduce_batch_size(raised.value)
    assert lightning_memory.is_oom_error(raised.value)
    assert counts == [0, 1]


def test_cases_have_different_steps():
    all_cases = cases()
    assert (
        len({case.name for case in all_cases})
        == len({json.dumps(case.config_of(1)) for case in all_cases})
        == 6
    )
    for case in all_cases:
        assert TrainConfig.model_validate(case.config_of(3)).micro_batch_size == 3
        SpecialIds.model_validate(case.special_ids)
        assert 300 * 2**20 <= case.memory_budget_bytes <= 1.5 * 2**30
