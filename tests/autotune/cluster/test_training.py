from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cluster.batch import read_template
from autotune.cluster.site import SiteFile, SlurmSettings
from autotune.cluster.training import TrainRequest, default_ranks, term_lead_s, train_script
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


def script_of(request, site=None):
    site = site or SiteFile()
    return train_script(request, site, read_template("train", site, None))


def test_a_job_takes_what_the_profile_was_tuned_with():
    request = with_gpus()
    assert default_ranks(request.profile) == 4
    script = script_of(replace(request, ranks=4)).splitlines()
    for option in ("job-name=train-one", "nodes=2", "gres=gpu:4", "cpus-per-task=48"):
        assert f"#SBATCH --{option}" in script
    assert request.script == Path("runs/one/train.sbatch")
    assert default_ranks(PROFILE) == 1


def test_a_site_may_say_how_many_processors_each_rank_gets():
    script = script_of(with_gpus(), SiteFile(slurm=SlurmSettings(cpus_per_rank=12)))
    assert "#SBATCH --cpus-per-task=24\n" in script
    assert " --cpus 24 " in script


@pytest.mark.parametrize(("mib_per_cpu", "mib"), [
    (2048, 2 * 2048),
    (16, 640),  # a quarter more than the half GiB of the sweep
    (2**20, 2**14),
])  # fmt: skip
def test_memory_is_the_sites_per_processor_more_if_more_was_measured_and_never_more_than_there_was(mib_per_cpu, mib):
    site = SiteFile(slurm=SlurmSettings(memory_mib_per_cpu=mib_per_cpu))
    assert f"#SBATCH --mem={mib}M\n" in script_of(REQUEST, site)


def test_a_dataset_is_staged_where_the_site_has_local_disks_unless_the_profile_says_where():
    site = SiteFile(node_local_path="$TMPDIR")
    assert "--set 'train.data.stage_to=$TMPDIR'" in script_of(REQUEST, site)
    assert "stage_to" not in script_of(REQUEST)
    data = PROFILE.train.data.model_copy(update={"stage_to": "/mine"})
    chosen = replace(REQUEST, config=PROFILE.train.model_copy(update={"data": data}))
    assert "stage_to" not in script_of(chosen, site)


def test_the_trainer_continues_with_the_settings_that_were_given():
    words = " ".join(script_of(REQUEST).replace("\\\n", "").split())
    assert " -m trainer --profile profiles/p.toml --data data --out runs/one --resume auto " in words
    assert " --set train.max_steps=7 }" in words


def test_larger_models_are_told_earlier_and_torchrun_gives_up_before_slurm_does():
    assert term_lead_s(REQUEST) == 120
    probe = PROFILE.evidence.probe.model_copy(update={"parameters": 2_000_000_000})
    large = PROFILE.model_copy(update={"evidence": PROFILE.evidence.model_copy(update={"probe": probe})})
    request = replace(REQUEST, profile=large)
    lead_s = term_lead_s(request)
    assert lead_s > 300
    script = script_of(request)
    assert f"#SBATCH --signal=TERM@{lead_s}\n" in script
    assert f"--shutdown-timeout={lead_s - 15}" in script
    assert "TERM@90\n" in script_of(request, SiteFile(slurm=SlurmSettings(term_lead_s=90)))


def test_a_time_limit_that_leaves_nothing_to_train_in_is_refused():
    with pytest.raises(BadInput, match="00:02:00, cannot hold its start"):
        script_of(replace(REQUEST, time="00:02:00"))
