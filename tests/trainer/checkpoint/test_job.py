from trainer.checkpoint.job import job_name

SLURM = {"SLURM_JOB_ID": "17"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
RESTARTED_TORCHRUN = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}


def test_torchrun_job_name_survives_a_restart():
    assert job_name(TORCHRUN).startswith("torchrun-")
    assert job_name(RESTARTED_TORCHRUN) == job_name(TORCHRUN)


def test_slurm_job_name_takes_precedence_over_torchrun():
    assert job_name(TORCHRUN | SLURM) == "slurm-17"


def test_process_without_a_job_has_no_job_name():
    assert job_name({}) == ""
