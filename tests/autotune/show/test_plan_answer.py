import json

import pytest

from autotune.core.plan import Fleet
from autotune.show.answers import answer_json
from autotune.show.plan_answer import plan_answer
from tests.autotune.show.test_plan import example


def answered(**changes):
    return json.loads(answer_json(plan_answer(example(**changes))))


def test_every_figure_has_its_bounds_what_it_rests_on_and_its_source():
    figures = answered()["figures"]
    assert figures["wall_s"]["basis"] == "assumed"
    assert figures["wall_s"]["low"] == pytest.approx(450_000)
    assert figures["rank_tokens_per_s"]["confidence"] == 0.95
    assert all(one is None or one["source"] for one in figures.values())


def test_machines_memory_and_limits_are_there():
    found = answered()
    assert found["ranks"] == 256
    assert found["memory"]["total_bytes"][0] == 12 * 10**9
    assert len(found["compute_optimal"]["limits"]) >= 3
    assert found["next"].startswith("autotune probe")


def test_what_nothing_tells_is_null():
    found = answered(optimal=None, memory=None, memory_missing="not traced", checkpoints=None, wall_s=None)
    assert found["compute_optimal"] is found["memory"] is found["figures"]["wall_s"] is None
    assert found["figures"]["checkpoint_bytes"] is found["checkpoints_kept"] is None
    assert found["memory_missing"] == "not traced"


def test_hours_are_of_what_there_is():
    cpu = Fleet(device="cpu", name="A CPU", nodes=1, ranks_per_node=2, cpus_per_rank=2.0, memory_bytes=2**30)
    assert answered()["figures"]["cpu_hours"] is None
    figures = answered(fleet=cpu)["figures"]
    assert figures["gpu_hours"] is None
    assert figures["cpu_hours"]["value"] == 35_000
