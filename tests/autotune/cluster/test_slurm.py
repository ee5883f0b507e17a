import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cluster.slurm import read_slurm

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_END_TIME": "1700003600",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURMD_NODENAME": "n1",
}


def nothing(_):
    return None


def test_job_is_described_from_its_environment():
    facts = read_slurm(JOB, lambda name: f"/usr/bin/{name}")
    assert (facts.job_id, facts.in_job, facts.is_login_node) == ("4711", True, False)
    assert (facts.nodes, facts.tasks, facts.gpus_per_node) == (4, 8, 2)
    assert facts.end_time_s == 1_700_003_600
    assert facts.commands == ("sbatch", "srun", "sinfo")


def test_outside_a_cluster_everything_is_missing():
    facts = read_slurm({}, nothing)
    assert (facts.job_id, facts.end_time_s, facts.nodes, facts.tasks, facts.gpus_per_node) == (None,) * 5
    assert facts.commands == ()
    assert not facts.in_job
    assert not facts.is_login_node


def test_sbatch_without_a_job_is_a_login_node():
    assert read_slurm({}, lambda name: name if name == "sbatch" else None).is_login_node


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("h100:2", 2), ("h100:2,a100:1", 3), ("", None), ("h100", None)])
def test_requested_gpus_are_added_up_over_their_types(text, count):
    assert read_slurm({"SLURM_GPUS_PER_NODE": text}, nothing).gpus_per_node == count


@given(st.dictionaries(st.sampled_from([*JOB, "SLURM_GPUS_PER_NODE", "SLURM_NNODES"]), st.text()))
def test_any_environment_is_readable(environment):
    facts = read_slurm(environment, nothing)
    assert facts.nodes is None or facts.nodes >= 0
