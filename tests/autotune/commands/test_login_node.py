import pytest
from autotune.commands.login_node import refuse_login_node

from autotune.errors import MachineLacks


def test_a_login_node_is_refused_with_the_command_as_a_job(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(MachineLacks, match="login node") as refused:
        refuse_login_node(["autotune", "workers", "--profile", "my p.toml"])
    assert "autotune workers --profile 'my p.toml' --slurm." in refused.value.next_step
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    refuse_login_node(["autotune"])


def test_a_machine_without_slurm_is_no_login_node(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    refuse_login_node(["autotune"])
