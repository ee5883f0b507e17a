import random

import pytest

from tests.system.faults.mutations import mutate, mutate_files

pytestmark = pytest.mark.system


def test_damaged_and_hostile_files_never_end_in_a_traceback(tmp_path):
    found = mutate_files(tmp_path, cases=300, seed=1)
    assert found["tracebacks"] == 0, found["first_traceback"]
    assert min(found["by_kind"].values()) > 0
    assert found["by_exit_code"]["3"] > 50  # refused with a message; the rest is still of its format


@pytest.mark.parametrize("suffix", [".json", ".toml", ".jsonl", ".npy", ".txt"])
def test_a_mutation_depends_on_its_draws_alone(suffix):
    content = b'{"a": [1, 2], "b": {"c": "d"}}\n'
    damaged = {mutate(content, suffix, random.Random(seed)) for seed in range(40)}
    assert damaged == {mutate(content, suffix, random.Random(seed)) for seed in range(40)}
    assert len(damaged) > 20
