import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cluster.batch import MeasureJob, Shape, measure_script, read_template, render
from autotune.cluster.site import SiteFile, SlurmSettings, Templates, read_site
from autotune.cluster.training import train_script
from autotune.errors import BadInput
from tests.autotune.cluster.test_training import with_gpus

SITE = SiteFile(
    prologue=["module load python/3.11", "export LANG=C"],
    command_prefix="apptainer exec --nv image.sif",
    slurm=SlurmSettings(account="project1", partition="gpu", gres="gpu:h100:{count}", time="01:00:00"),
)
JOB = MeasureJob(
    name="workers-tiny",
    purpose="Counts the loader workers that tiny needs.",
    command=["autotune", "workers"],
    shape=Shape(gpus=2, cpus=16),
    log=Path("reports/jobs/workers-%j.log"),
)
TRAINING = replace(with_gpus(allotted_cpus=24), profile_path=Path("my p.toml"), python="python")


def measured(site: SiteFile = SITE, **changes) -> str:
    return measure_script(replace(JOB, **changes), site, read_template("measure", site, None))


def trained(site: SiteFile = SITE, **changes) -> str:
    return train_script(replace(TRAINING, **changes), site, read_template("train", site, None))


def statement(script: str, beginning: str) -> str:
    return next(line for line in script.replace("\\\n", "").splitlines() if line.startswith(beginning))


def checked_by_bash(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return script


def test_what_the_cluster_wants_said_is_said():
    script = checked_by_bash(measured()).splitlines()
    assert script[0] == "#!/bin/bash"
    for option in (
        "job-name=workers-tiny", "nodes=1", "ntasks-per-node=1", "cpus-per-task=16", "gres=gpu:h100:2",
        "mem-per-cpu=2048M", "time=01:00:00", "account=project1", "partition=gpu", "no-requeue",
        "output=reports/jobs/workers-%j.log",
    ):  # fmt: skip
        assert f"#SBATCH --{option}" in script


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


def test_every_directive_of_the_papers_public_script_can_be_said(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(PAPER)
    site = read_site(path)
    script = checked_by_bash(trained(site, nodes=128))
    for line in (
        "#SBATCH --account=project", "#SBATCH --partition=gpu", "#SBATCH --constraint=nvlink", "#SBATCH --nodes=128",
        "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:h100:2", "#SBATCH --cpus-per-task=24", "#SBATCH --mem=0",
        "#SBATCH --exclude='d-1-[1-3],d-2-7'", "#SBATCH --distribution=nopack", "#SBATCH --time=1-00:00:00",
        "#SBATCH --exclusive", "#SBATCH --reservation=pretraining", "conda activate pretraining",
        "export NCCL_SOCKET_IFNAME=ib0", "export GLOO_SOCKET_IFNAME=ib0", "export NCCL_IB_DISABLE=1",
    ):  # fmt: skip
        assert line in script.splitlines()
    assert "--mem-per-cpu" not in script
    assert "'train.data.stage_to=$TMPDIR'" in script  # the trainer fills it in, on each node


@pytest.mark.parametrize("script", [measured(), trained()])
def test_directives_come_before_any_command(script):
    lines = script.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    first = min(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert last < first


def test_without_gpus_none_are_asked_for_and_without_a_spelling_the_usual_one_is_used():
    assert "--gres" not in measured(shape=Shape())
    assert "#SBATCH --gres=gpu:3\n" in measured(SiteFile(), shape=Shape(gpus=3))


@pytest.mark.parametrize("script", [measured(SiteFile()), trained(SiteFile())])
def test_what_a_site_does_not_say_is_left_to_the_cluster(script):
    for option in ("account", "partition", "constraint", "exclude", "distribution"):
        assert f"#SBATCH --{option}" not in script
    assert "#SBATCH --mem=" not in measured(SiteFile())


def test_the_prologue_runs_before_the_command_and_the_prefix_right_before_it():
    script = measured()
    assert script.index("module load python/3.11") < script.index("export LANG=C") < script.index("\nsrun ")
    assert statement(script, "srun ").endswith(" apptainer exec --nv image.sif autotune workers")


def test_steps_are_told_their_cpus_which_they_do_not_inherit():
    assert " --cpus-per-task=16 " in statement(measured(), "srun ")
    assert " --cpus-per-task=24 " in statement(trained(), "on_every_node=")


def test_a_command_that_reaches_other_nodes_by_itself_runs_once():
    script = checked_by_bash(measured(SiteFile(), with_srun=False, shape=Shape(nodes=2)))
    assert "#SBATCH --nodes=2" in script
    assert "\nautotune workers\n" in script
    assert "\nsrun" not in script


ODD = ["autotune", "workers", "--profile", "my profiles/$HOME/`id`.toml", "--data", "a'b\\c;rm -rf *", "&", "é\n"]


def test_a_shell_expands_nothing_in_the_arguments(tmp_path):
    said = tmp_path / "said"
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nshift 5\nprintf "%s\\0" "$@" > {said}\n')
    srun.chmod(0o755)
    script = measured(SiteFile(), command=ODD, variables={"AUTOTUNE_DATA": "a $(id) 'b"})
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/x"}
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=tmp_path)
    assert said.read_text().split("\0")[:-1] == ODD
    assert shlex.split(statement(script, "export AUTOTUNE_DATA"))[1] == "AUTOTUNE_DATA=a $(id) 'b"


@pytest.mark.parametrize("name", ["a\n#SBATCH --uid=0", "\x1b[2J"])
def test_a_name_cannot_become_a_directive(name):
    with pytest.raises(BadInput, match="--job-name"):
        measured(name=name)


def test_training_goes_on_by_being_requeued_or_by_a_chain():
    script = checked_by_bash(trained())
    assert "#SBATCH --requeue" in script
    assert "#SBATCH --signal=TERM@120" in script
    assert "#SBATCH --open-mode=append" in script
    assert "scontrol requeue" in script
    chained = checked_by_bash(trained(SiteFile(slurm=SlurmSettings(requeue=False)), chain=3))
    assert "#SBATCH --dependency=singleton" in chained
    assert "#SBATCH --no-requeue" in chained
    assert "scontrol requeue" not in chained


def test_torchruns_own_variables_are_filled_in_and_nothing_else():
    line = statement(trained(), "    exec apptainer")
    assert '"--rdzv-endpoint=$endpoint"' in line
    assert "--profile 'my p.toml'" in line
    assert " ".join(line.split()).startswith("exec apptainer exec --nv image.sif python -m torch.distributed.run")


def test_a_site_may_keep_ranks_unbound_in_training_and_in_trials():
    unbound = SiteFile(numa_binding=False)
    for script in (trained, measured):
        assert "export AUTOTUNE_NUMA_BINDING=0\n" in checked_by_bash(script(unbound))
        assert "AUTOTUNE_NUMA_BINDING" not in script(SiteFile())


def test_a_site_may_bring_its_own_template(tmp_path):
    (tmp_path / "mine.sbatch").write_text("#!/bin/bash\n{{ command }} # {{ purpose }}\n")
    site = SiteFile(templates=Templates(measure="mine.sbatch"))
    text = read_template("measure", site, tmp_path / "site.toml")
    assert (
        measure_script(JOB, site, text)
        == "#!/bin/bash\nautotune workers # Counts the loader workers that tiny needs.\n"
    )
    with pytest.raises(BadInput, match="cannot read the template") as refused:
        read_template("train", SiteFile(templates=Templates(train="none.sbatch")), tmp_path / "site.toml")
    assert "templates.train" in refused.value.next_step


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ comand }}", "'comand' is undefined"), ("{% if %}", "line 1"), ("{{ ''.__class__.__mro__ }}", "unsafe")],
)
def test_a_wrong_template_is_refused_with_what_it_may_use(template, words):
    with pytest.raises(BadInput, match="template") as refused:
        render(template, {"command": "c", "purpose": "p"})
    assert words in refused.value.message
    assert "command, purpose" in refused.value.next_step
