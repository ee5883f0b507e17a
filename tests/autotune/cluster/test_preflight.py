from dataclasses import replace

import pytest

from autotune.cluster.preflight import Needed, NodeFacts, describe, problems_of
from tests.autotune.profiles import FINGERPRINT

GIB = 2**30
MADE_ON = FINGERPRINT.model_copy(
    update={"device": "cuda", "gpu_name": "H100 NVL", "gpu_total_bytes": 94 * GIB, "dataset_hash": "d" * 64}
)
EXPECTED = Needed(ranks=2, cpus=24, code_sha256="a" * 64, made_on=MADE_ON)
NODE = NodeFacts(
    name="n1", allotted_cpus=24, gpu_names=("H100 NVL", "H100 NVL"), gpu_total_bytes=(94 * GIB, 94 * GIB),
    nvlinked=True, code_sha256="a" * 64, dataset_hash="d" * 64, dataset_place="/data",
)  # fmt: skip


def test_a_node_as_expected_has_no_problem_and_is_described_on_one_line():
    assert problems_of(EXPECTED, NODE) == ()
    assert problems_of(EXPECTED, replace(NODE, allotted_cpus=48)) == ()
    line = describe(NODE)
    assert "\n" not in line
    assert "n1: 24 CPUs; GPUs: H100 NVL 94" in line
    assert "NVLink: yes; code aaaaaaaaaaaa; dataset dddddddddddd" in line


@pytest.mark.parametrize(
    ("changes", "field", "found", "next_step"),
    [
        ({"allotted_cpus": 1}, "allotted_cpus", "1", "--cpus-per-task"),
        ({"gpu_names": ("H100 NVL",), "gpu_total_bytes": (94 * GIB,)}, "gpu_count", "1", "slurm.exclude"),
        ({"gpu_names": ("A100", "H100 NVL")}, "gpu_name", "A100", "slurm.exclude"),
        ({"gpu_total_bytes": (94 * GIB, 80 * GIB)}, "gpu_total_bytes", str(80 * GIB), "slurm.exclude"),
        ({"code_sha256": "b" * 64}, "code", "b" * 12, "Install"),
        ({"dataset_hash": "e" * 64}, "dataset", "e" * 12, "/data"),
        ({"dataset_hash": None, "dataset_missing": "no such place"}, "dataset", "no such place", "/data"),
    ],
)
def test_what_differs_is_named_with_both_values_and_what_to_do(changes, field, found, next_step):
    (problem,) = problems_of(EXPECTED, replace(NODE, **changes))
    assert (problem.field, problem.found) == (field, found)
    assert problem.expected != problem.found
    assert next_step in problem.next_step


def test_on_cpus_gpus_do_not_matter():
    on_cpu = replace(EXPECTED, made_on=FINGERPRINT.model_copy(update={"dataset_hash": "d" * 64}))
    assert problems_of(on_cpu, replace(NODE, gpu_names=(), gpu_total_bytes=(), nvlinked=None)) == ()
    assert "GPUs: none; NVLink: n/a" in describe(replace(NODE, gpu_names=(), gpu_total_bytes=(), nvlinked=None))
