import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cluster.job_script import Shape, measure_script, read_template, render
from autotune.cluster.site_file import (
    NetworkSettings,
    SiteFile,
    SlurmSettings,
    Templates,
    job_variables,
    read_site,
)
from autotune.errors import BadInput
from autotune.launch.training_job import (
    TrainRequest,
    default_ranks,
    term_lead_s,
    train_script,
)
from testbed.examples.profiles import but, example_profile
from trainer.formats.errors import BadConfig

NO_SITE = SiteFile()
SITE = SiteFile(
    prologue=["module load python/3.11", "export LANG=C"],
    command_prefix="apptainer exec --nv image.sif",
    slurm=SlurmSettings(
        account="project1", partition="gpu", gres="gpu:h100:{count}", time="01:00:00"
    ),
)
JOB = {
    "name": "workers-tiny",
    "purpose": "Counts the loader workers that tiny needs.",
    "command": ["autotune", "workers"],
    "shape": Shape(gpus=2, cpus=16),
    "log": Path("reports/jobs/workers-%j.log"),
}
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
    tables = {"device": "cuda", "gpu_count": 4, "allotted_cpus": 48} | fingerprint
    profile = but(PROFILE, train={"device": "cuda"}, fingerprint=tables)
    return replace(REQUEST, profile=profile, config=profile.train)


TRAINING = replace(
    with_gpus(allotted_cpus=24), profile_path=Path("my p.toml"), python="python"
)


def measured(site: SiteFile = SITE, **changes) -> str:
    return measure_script(site, read_template("measure", site, None), **JOB | changes)


def trained(site: SiteFile = SITE, **changes) -> str:
    return script_of(replace(TRAINING, **changes), site)


def script_of(request: TrainRequest, site: SiteFile = NO_SITE) -> str:
    return train_script(request, site, read_template("train", site, None))


def statement(script: str, beginning: str) -> str:
    return next(
        line
        for line in script.replace("\\\n", "").splitlines()
        if line.startswith(beginning)
    )


def checked(script: str) -> str:
    """Return the script if bash understands it and its directives come first."""
    lines = script.splitlines()
    command = next(
        number for number, line in enumerate(lines) if line and not line.startswith("#")
    )
    assert not any(line.startswith("#SBATCH") for line in lines[command:])
    process = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    return script


def options_of(script: str) -> set[str]:
    return {
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH --")
    }


def test_writes_only_directives_the_site_sets():
    script = checked(measured())
    assert script.startswith("#!/bin/bash\n")
    by_site = {"gres=gpu:h100:2", "time=01:00:00", "account=project1", "partition=gpu"}
    usual = {
        "job-name=workers-tiny",
        "nodes=1",
        "ntasks-per-node=1",
        "cpus-per-task=16",
        "mem-per-cpu=2048M",
        "no-requeue",
        "output=reports/jobs/workers-%j.log",
    }
    assert options_of(script) == usual | by_site
    assert options_of(measured(NO_SITE)) == usual | {"gres=gpu:2", "time=04:00:00"}
    assert not any("gres" in option for option in options_of(measured(shape=Shape())))


PAPER = """
prologue = ["source /opt/conda/etc/profile.d/conda.sh", "conda activate pretraining"]
node_local_path = "$TMPDIR"
[slurm]
account = "project"
partition = "gpu"
constraint = "nvlink"
gres = "gpu:h100:{count}"
gpus_per_node = 2
cpus_per_rank = 12
mem = "0"
exclude = "d-1-[1-3],d-2-7"
distribution = "nopack"
time = "1-00:00:00"
extra = ["--exclusive", "--reservation=pretraining"]
[network]
interface = "ib0"
[network.nccl]
NCCL_IB_DISABLE = "1"
"""


def test_writes_every_directive_of_the_papers_script(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(PAPER)
    script = checked(trained(read_site(path), nodes=128))
    assert {
        "account=project",
        "partition=gpu",
        "constraint=nvlink",
        "nodes=128",
        "ntasks-per-node=1",
        "gres=gpu:h100:2",
        "cpus-per-task=24",
        "mem=0",
        "exclude='d-1-[1-3],d-2-7'",
        "distribution=nopack",
        "time=1-00:00:00",
        "exclusive",
        "reservation=pretraining",
    } <= options_of(script)
    assert {
        "conda activate pretraining",
        "export NCCL_SOCKET_IFNAME=ib0",
        "export GLOO_SOCKET_IFNAME=ib0",
        "export NCCL_IB_DISABLE=1",
    } <= set(script.splitlines())
    assert "--mem-per-cpu" not in script
    assert script.count(" --cpus 24 ") == 1
    # The trainer fills it in, on each node.
    assert "'train.data.stage_to=$TMPDIR'" in script


def test_prologue_comes_before_the_command():
    script = measured()
    assert (
        script.index("module load python/3.11")
        < script.index("export LANG=C")
        < script.index("\nsrun ")
    )


def test_step_is_told_its_cpus():
    script = measured()
    step = statement(script, "srun ")
    assert step.endswith(" apptainer exec --nv image.sif autotune workers")
    assert " --cpus-per-task=16 " in step
    assert " --cpus-per-task=24 " in statement(trained(), "on_every_node=")


ODD = [
    "autotune",
    "workers",
    "my profiles/$HOME/`id`.toml",
    "--data",
    "a'b\\c;rm -rf *",
    "&",
    "é\n",
]


def test_shell_expands_nothing_in_arguments(put, tmp_path):
    put("srun", f'shift 5\nprintf "%s\\0" "$@" > {tmp_path}/said')
    script = measured(NO_SITE, command=ODD, variables={"AUTOTUNE_DATA": "a $(id) 'b"})
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path)
    assert (tmp_path / "said").read_text().split("\0")[:-1] == ODD
    assert (
        shlex.split(statement(script, "export AUTOTUNE_DATA"))[1]
        == "AUTOTUNE_DATA=a $(id) 'b"
    )


@pytest.mark.parametrize("name", ["a\n#SBATCH --uid=0", "\x1b[2J"])
def test_name_cannot_become_a_directive(name):
    with pytest.raises(BadInput, match="--job-name"):
        measured(name=name)


def test_training_resumes_by_requeue():
    script = checked(trained())
    assert {"requeue", "signal=TERM@120", "open-mode=append"} <= options_of(script)
    assert "scontrol requeue" in script


def test_training_resumes_by_a_chain_of_jobs():
    chained = checked(trained(SiteFile(slurm=SlurmSettings(requeue=False)), chain=3))
    assert {"dependency=singleton", "no-requeue"} <= options_of(chained)
    assert "scontrol requeue" not in chained


def test_fills_in_torchrun_variables():
    line = statement(trained(), "    exec apptainer")
    assert '"--rdzv-endpoint=$endpoint"' in line
    assert "'my p.toml'" in line
    assert " ".join(line.split()).startswith(
        "exec apptainer exec --nv image.sif python -P -m autotune.cluster.job"
    )


def test_trainer_is_given_the_settings():
    words = " ".join(script_of(REQUEST).replace("\\\n", "").split())
    assert (
        " -m trainer profiles/p.toml --data data --out runs/one --resume auto " in words
    )
    assert " --set train.max_steps=7 }" in words


def test_site_may_keep_ranks_unbound():
    for script in (trained, measured):
        assert "export AUTOTUNE_NUMA_BINDING=0\n" in checked(
            script(SiteFile(numa_binding=False))
        )
        assert "AUTOTUNE_NUMA_BINDING" not in script(NO_SITE)


def test_site_may_bring_its_own_template(tmp_path):
    (tmp_path / "mine.sbatch").write_text(
        "#!/bin/bash\n{{ command }} # {{ purpose }}\n"
    )
    site = SiteFile(templates=Templates(measure="mine.sbatch", train="none.sbatch"))
    script = measure_script(
        site, read_template("measure", site, tmp_path / "site.toml"), **JOB
    )
    assert script.endswith(
        "\nautotune workers # Counts the loader workers that tiny needs.\n"
    )


def test_unreadable_template_names_its_setting(tmp_path):
    site = SiteFile(templates=Templates(measure="mine.sbatch", train="none.sbatch"))
    with pytest.raises(BadInput, match="cannot read the template") as refused:
        read_template("train", site, tmp_path / "site.toml")
    assert "templates.train" in refused.value.next_step


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ comand }}", "'comand' is undefined"),
        ("{% if %}", "line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_rejects_wrong_template(template, words):
    with pytest.raises(BadInput, match="template") as refused:
        render(template, {"command": "c", "purpose": "p"})
    assert words in refused.value.message
    assert "command, purpose" in refused.value.next_step


def test_job_takes_what_the_profile_was_tuned_with():
    request = with_gpus()
    assert default_ranks(request.profile) == 4
    options = options_of(script_of(replace(request, ranks=4)))
    assert {
        "job-name=train-one",
        "nodes=2",
        "gres=gpu:4",
        "cpus-per-task=48",
    } <= options
    assert request.script == Path("runs/one/train.sbatch")
    assert default_ranks(PROFILE) == 1


@pytest.mark.parametrize(
    ("mib_per_cpu", "mib"),
    [
        (2048, 2 * 2048),
        (16, 640),  # a quarter more than the half GiB of the sweep
        (2**20, 2**14),
    ],
)
def test_memory_follows_site_and_measurement(mib_per_cpu, mib):
    site = SiteFile(slurm=SlurmSettings(memory_mib_per_cpu=mib_per_cpu))
    assert f"#SBATCH --mem={mib}M\n" in script_of(REQUEST, site)


def test_stages_dataset_on_local_disks():
    site = SiteFile(node_local_path="$TMPDIR")
    assert "--set 'train.data.stage_to=$TMPDIR'" in script_of(REQUEST, site)
    assert "stage_to" not in script_of(REQUEST)


def test_profile_decides_where_data_is_staged():
    site = SiteFile(node_local_path="$TMPDIR")
    data = PROFILE.train.data.model_copy(update={"stage_to": "/mine"})
    chosen = replace(REQUEST, config=but(PROFILE, train={"data": data}).train)
    assert "stage_to" not in script_of(chosen, site)


def test_larger_models_are_stopped_earlier():
    assert term_lead_s(REQUEST) == 120
    probe = PROFILE.evidence.probe.model_copy(update={"parameters": 2_000_000_000})
    request = replace(REQUEST, profile=but(PROFILE, evidence={"probe": probe}))
    lead_s = term_lead_s(request)
    assert lead_s > 300
    script = script_of(request)
    assert f"#SBATCH --signal=TERM@{lead_s}\n" in script
    assert f"--shutdown-timeout={lead_s - 15}" in script
    assert "TERM@90\n" in script_of(
        request, SiteFile(slurm=SlurmSettings(term_lead_s=90))
    )


def test_interface_is_set_for_nccl_and_gloo():
    assert job_variables(SiteFile()) == {}
    network = NetworkSettings(
        interface="ib0", nccl={"NCCL_SOCKET_IFNAME": "ib1", "NCCL_DEBUG": "WARN"}
    )
    variables = job_variables(SiteFile(network=network))
    assert variables == {
        "NCCL_SOCKET_IFNAME": "ib1",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "WARN",
    }


@pytest.mark.parametrize(
    "text",
    [
        "acount = 1",
        '[slurm]\ntime = "soon"',
        '[slurm]\naccount = "a\\nb"',
        'prologue = ["x\\ny"]',
        '[network.nccl]\n"A; rm" = "x"',
        "[slurm]\nterm_lead_s = 15",
    ],
)
def test_rejects_unusable_site_file(tmp_path, text):
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(BadConfig):
        read_site(tmp_path / "site.toml")
