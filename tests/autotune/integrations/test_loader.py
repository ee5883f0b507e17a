"""Sweeps of loaders of one's own."""

import pytest

from autotune.errors import BadInput
from autotune.workers.own_sections import loader_blocks

pytestmark = pytest.mark.system


def test_finds_fewest_workers_that_keep_up(own_code):
    sweep = own_code.sweep("sleepy", budget_s=12.0)
    within = sweep.undecided_between or [sweep.chosen]
    assert within[0] <= 4 <= within[-1]  # 30 ms for each batch, and 10 ms for each step
    assert sweep.worker_bytes > 2**20
    assert sweep.batch_bytes == 4000


def test_replayed_step_loads_nothing_in_process(own_code):
    # Longer than the 30 ms of a batch.
    sweep = own_code.sweep("sleepy", step_time_s=0.045, budget_s=6.0, max_workers=2)
    assert sweep.chosen != 0
    assert sweep.rows[0].num_workers == 0
    assert max(sweep.rows[0].batches_per_s) < 1 / (0.045 + 0.030)


def test_own_step_consumes_the_batches(own_code):
    sweep = own_code.sweep("sleepy", step="behaves", budget_s=5.0, max_workers=1)
    assert sweep.replayed_step_s is None
    assert {row.num_workers for row in sweep.rows} <= {0, 1}


def test_loader_without_workers_is_the_limit(own_code):
    sweep = own_code.sweep("locked", budget_s=4.0)
    assert not sweep.keeps_up
    text = _lines(sweep)
    assert "the loader itself is the limit" in text
    assert "ignores num_workers" in text


def test_end_of_epoch_counts_as_cost(own_code):
    sweep = own_code.sweep("short", budget_s=3.0, max_workers=0)
    assert sweep.epoch_batches == 3
    assert "An epoch has 3 batches" in _lines(sweep)


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("once", None, "has no batches after 3 batches"),
        ("empty", None, "has no batches"),
        ("not_iterable", None, "returned int, which is not iterable"),
        ("sleepy", "trains", "took 16 optimizer steps in one call"),
        ("sleepy", "builds_nothing", "returned NoneType|returned int"),
    ],
)
def test_unusable_loader_is_named(own_code, name, step, words):
    with pytest.raises(BadInput, match=words):
        own_code.sweep(name, step=step)


def _lines(sweep) -> str:
    return str(loader_blocks(sweep))
