from dataclasses import replace

import pytest

from autotune.launch.preflight import describe, problems_of
from autotune.machine.node_facts import NodeFacts
from tests.autotune.cluster.test_job_script import PROFILE, with_gpus

GIB = 2**30
ON_GPUS = with_gpus(
    gpu_name="H100 NVL", gpu_total_bytes=94 * GIB, dataset_hash="d" * 64
).profile
NODE = NodeFacts(
    name="n1",
    allotted_cpus=24,
    gpu_names=("H100 NVL", "H100 NVL"),
    gpu_total_bytes=(94 * GIB, 94 * GIB),
    nvlinked=True,
    code_sha256="a" * 64,
    dataset_hash="d" * 64,
    dataset_dir="/data",
)


def problems(node, profile=ON_GPUS):
    return problems_of(profile, node, ranks=2, cpus=24, code_sha256="a" * 64)


def test_expected_node_has_no_problem():
    assert problems(NODE) == ()
    assert problems(replace(NODE, allotted_cpus=48)) == ()


def test_node_is_described_on_one_line():
    line = describe(NODE)
    assert "\n" not in line
    assert "n1: 24 CPUs; GPUs: H100 NVL 94" in line
    assert "NVLink: yes; code aaaaaaaaaaaa; dataset dddddddddddd" in line


@pytest.mark.parametrize(
    ("changes", "field", "found_value", "next_step"),
    [
        ({"allotted_cpus": 1}, "allotted_cpus", "1", "--cpus-per-task"),
        (
            {"gpu_names": ("H100 NVL",), "gpu_total_bytes": (94 * GIB,)},
            "gpu_count",
            "1",
            "slurm.exclude",
        ),
        ({"gpu_names": ("A100", "H100 NVL")}, "gpu_name", "A100", "slurm.exclude"),
        (
            {"gpu_total_bytes": (94 * GIB, 80 * GIB)},
            "gpu_total_bytes",
            str(80 * GIB),
            "slurm.exclude",
        ),
        ({"code_sha256": "b" * 64}, "code", "b" * 12, "Install"),
        ({"dataset_hash": "e" * 64}, "dataset", "e" * 12, "/data"),
        (
            {"dataset_hash": None, "dataset_missing": "no such place"},
            "dataset",
            "no such place",
            "/data",
        ),
    ],
    ids=[
        "CPUs",
        "number of GPUs",
        "GPU model",
        "GPU memory",
        "code",
        "dataset",
        "no dataset",
    ],
)
def test_problem_names_both_values(changes, field, found_value, next_step):
    (problem,) = problems(replace(NODE, **changes))
    assert (problem.field, problem.found) == (field, found_value)
    assert problem.expected != problem.found
    assert next_step in problem.next_step


def test_ignores_gpus_when_training_on_cpu():
    node = replace(NODE, gpu_names=(), gpu_total_bytes=(), nvlinked=None)
    assert (
        problems(replace(node, dataset_hash=PROFILE.fingerprint.dataset_hash), PROFILE)
        == ()
    )
    assert "GPUs: none; NVLink: n/a" in describe(node)
