"""Sweeps of loaders of one's own."""

import pytest

from autotune.errors import BadInput
from autotune.integrations.sections import loader_section
from autotune.integrations.values import OwnProfile

pytestmark = pytest.mark.system


def test_the_fewest_workers_that_keep_up_are_found(own):
    found = own.sweep("sleepy", budget_s=12.0)
    within = found.undecided_between or [found.chosen]
    assert within[0] <= 4 <= within[-1]  # 30 ms for each batch, and 10 ms for each step
    assert found.worker_bytes > 2**20
    assert found.batch_bytes == 4000


def test_nothing_is_loaded_in_process_during_a_replayed_step(own):
    # Longer than the 30 ms of a batch.
    found = own.sweep("sleepy", step_time_s=0.045, budget_s=6.0, max_workers=2)
    assert found.chosen != 0
    assert found.rows[0].num_workers == 0
    assert max(found.rows[0].batches_per_s) < 1 / (0.045 + 0.030)


def test_your_own_step_consumes_the_batches(own):
    found = own.sweep("sleepy", step="behaves", budget_s=5.0, max_workers=1)
    assert found.replayed_step_s is None
    assert {row.num_workers for row in found.rows} <= {0, 1}


def test_a_loader_that_ignores_its_workers_is_the_limit(own):
    found = own.sweep("locked", budget_s=4.0)
    assert not found.keeps_up
    told = _lines(found)
    assert "the loader itself is the limit" in told
    assert "ignores num_workers" in told


def test_the_end_of_an_epoch_is_part_of_the_cost(own):
    found = own.sweep("short", budget_s=3.0, max_workers=0)
    assert found.epoch_batches == 3
    assert "An epoch has 3 batches" in _lines(found)


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("once", None, "has no batches after 3 batches"),
        ("empty", None, "has no batches"),
        ("not_iterable", None, "returned int, which is not iterable"),
        ("sleepy", "trains", "took 16 optimizer steps in one call"),
        ("sleepy", "builds_nothing", "returned NoneType|returned int"),
    ],
)
def test_a_loader_that_cannot_be_used_is_named(own, name, step, said):
    with pytest.raises(BadInput, match=said):
        own.sweep(name, step=step)


def _lines(found) -> str:
    profile = OwnProfile.model_construct(
        evidence=OwnProfile.model_fields["evidence"].annotation(loader=found)
    )
    return str(loader_section(profile))
