"""What counters tell, once what a window holds beside computing is taken out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.bottleneck import StepPart
from autotune.decide.counters import Counters, data_share, with_counters
from tests.autotune.decide.worlds import World, profile_of, settings

shares = st.floats(0, 0.3)


def parts(**known: float) -> list[StepPart]:
    return [StepPart(cause=cause, share=share) for cause, share in known.items()]  # type: ignore[arg-type]


def window(**changes: object):
    world = World()
    evidence = profile_of(world, settings(world)).evidence.workers
    assert evidence is not None
    return evidence.rows[0].model_copy(update=changes)


def told(known: list[StepPart], counters: Counters, uneven: float = 0.0) -> dict[str, float]:
    return {one.cause: one.share for one in with_counters(known, counters, uneven)[0]}


class TestDataShare:
    def test_waits_of_ranks_that_wait_at_once_count_once(self):
        assert data_share(window(data_wait_share=0.8, ratio_to_ceiling=0.9)) == pytest.approx(0.1)

    def test_a_window_that_is_slower_without_waits_is_slower_by_chance(self):
        assert data_share(window(data_wait_share=0.001, ratio_to_ceiling=0.97)) == 0.001


class TestWithCounters:
    def test_devices_that_wait_for_other_ranks_do_not_wait_for_launches(self):
        counters = Counters(busy_share=0.54, tensor_share=0.4, memory_share=0.2, source="x")
        assert told(parts(straggler=0.4), counters)["host"] == pytest.approx(0, abs=1e-9)
        assert told(parts(straggler=0.0), counters)["host"] == pytest.approx(0.4)

    def test_ranks_that_wait_for_another_one_every_time_wait_for_programs(self):
        counters = Counters(busy_share=0.6, source="x")
        found = told(parts(straggler=0.3, network=0.1), counters, 0.3)
        assert (found["straggler"], found["network"]) == (0, pytest.approx(0.1))
        assert found["host"] >= 0.3

    def test_an_update_is_no_traffic_of_kernels_that_compute(self):
        counters = Counters(busy_share=0.95, tensor_share=0.35, memory_share=0.52, source="x")
        assert told(parts(update=0.5), counters)["memory"] < 0.05
        assert told(parts(update=0.0), counters)["memory"] > 0.4

    @given(shares, shares, shares, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
    def test_parts_are_never_more_than_the_step(self, waits, updates, padding, busy, tensor, memory):
        known = parts(network=waits, update=updates, padding=padding * (1 - waits - updates))
        found = told(known, Counters(busy_share=busy, tensor_share=tensor, memory_share=memory, source="x"))
        assert all(share >= 0 for share in found.values())
        assert sum(found.values()) <= 1 + 1e-9

    @given(st.floats(0, 1), st.floats(0, 1))
    def test_more_traffic_is_never_less_waiting_for_memory(self, one, other):
        less, more = sorted((one, other))
        found = [
            told([], Counters(busy_share=0.9, tensor_share=0.4, memory_share=memory, source="x"))["memory"]
            for memory in (less, more)
        ]
        assert found[0] <= found[1]
