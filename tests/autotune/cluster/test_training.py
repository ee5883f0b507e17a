from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cluster.site import SiteFile, SlurmSettings
from autotune.cluster.training import TrainRequest, default_ranks, term_lead_s, training_job
from autotune.errors import BadInput
from tests.autotune.profiles import example_profile

PROFILE = example_profile()
REQUEST = TrainRequest(
    profile_path=Path("profiles/p.toml"),
    profile=PROFILE,
    config=PROFILE.train,
    data_dir=Path("data"),
    assignments=["train.max_steps=7"],
    run=Path("runs/one"),
    nodes=2,
    ranks=2,
    python="/opt/python",
    torch_version="2.13.0",
    code_sha256="c",
    directory=Path("/home/me/project"),
)


def with_gpus(**fingerprint):
    there = PROFILE.fingerprint.model_copy(update={"device": "cuda", "gpu_count": 4, "allotted_cpus": 48} | fingerprint)
    train = PROFILE.train.model_copy(update={"device": "cuda"})
    profile = PROFILE.model_copy(update={"fingerprint": there, "train": train})
    return replace(REQUEST, profile=profile, config=train)


def test_a_job_takes_what_the_profile_was_tuned_with():
    request = with_gpus()
    assert default_ranks(request.profile) == 4
    job = training_job(replace(request, ranks=4), SiteFile())
    assert (job.shape.nodes, job.shape.gpus, job.shape.cpus) == (2, 4, 48)
    assert job.name == "train-one"
    assert job.script == Path("runs/one/train.sbatch")
    assert default_ranks(PROFILE) == 1


def test_a_site_may_say_how_many_processors_each_rank_gets():
    job = training_job(with_gpus(), SiteFile(slurm=SlurmSettings(cpus_per_rank=12)))
    assert job.shape.cpus == 24
    assert job.preflight[job.preflight.index("--cpus") + 1] == "24"


def test_memory_is_the_sites_per_processor_more_where_more_was_measured_and_never_more_than_there_was():
    assert training_job(REQUEST, SiteFile()).shape.memory_mib == 2 * 2048
    small = SiteFile(slurm=SlurmSettings(memory_mib_per_cpu=16))
    assert training_job(REQUEST, small).shape.memory_mib == 640  # a quarter more than the half GiB of the sweep
    huge = SiteFile(slurm=SlurmSettings(memory_mib_per_cpu=2**20))
    assert training_job(REQUEST, huge).shape.memory_mib == 2**14


def test_a_dataset_is_staged_where_the_site_has_local_disks_unless_the_profile_says_where():
    site = SiteFile(node_local_path="$TMPDIR")
    assert "train.data.stage_to=$TMPDIR" in training_job(REQUEST, site).trainer
    assert not any("stage_to" in word for word in training_job(REQUEST, SiteFile()).trainer)
    data = PROFILE.train.data.model_copy(update={"stage_to": "/mine"})
    chosen = replace(REQUEST, config=PROFILE.train.model_copy(update={"data": data}))
    assert not any("stage_to" in word for word in training_job(chosen, site).trainer)


def test_the_trainer_goes_on_by_itself_with_the_settings_that_were_given():
    words = training_job(REQUEST, SiteFile()).trainer
    assert words[:2] == ["-m", "trainer"]
    assert words[words.index("--out") + 1] == "runs/one"
    assert words[words.index("--resume") + 1] == "auto"
    assert words[words.index("--set") + 1] == "train.max_steps=7"


def test_larger_models_are_told_earlier_and_torchrun_gives_up_before_slurm_does():
    assert term_lead_s(REQUEST) == 120
    probe = PROFILE.evidence.probe.model_copy(update={"parameters": 2_000_000_000})
    large = PROFILE.model_copy(update={"evidence": PROFILE.evidence.model_copy(update={"probe": probe})})
    request = replace(REQUEST, profile=large)
    assert term_lead_s(request) > 300
    job = training_job(request, SiteFile())
    assert job.term_lead_s == term_lead_s(request)
    assert f"--shutdown-timeout={job.term_lead_s - 15}" in job.torchrun
    assert training_job(request, SiteFile(slurm=SlurmSettings(term_lead_s=90))).term_lead_s == 90


def test_a_time_limit_that_leaves_nothing_to_train_in_is_refused():
    with pytest.raises(BadInput, match="00:02:00, cannot hold its start"):
        training_job(replace(REQUEST, time="00:02:00"), SiteFile())
