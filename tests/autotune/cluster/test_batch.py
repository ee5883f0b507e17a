import shlex
import subprocess
from pathlib import Path

import pytest

from autotune.cluster.batch import batch_script, submit
from autotune.cluster.site import SiteFile, SlurmSettings
from autotune.errors import MachineLacks

SITE = SiteFile(
    prologue=["module load python/3.11", "export LANG=C"],
    command_prefix="apptainer exec --nv image.sif",
    slurm=SlurmSettings(account="project1", partition="gpu", gres="gpu:h100:{count}", time="01:00:00"),
)


def script_of(command: list[str], site: SiteFile = SITE, **changes) -> list[str]:
    options = {"name": "workers-tiny", "gpus": 2, "cpus": 16, "log": Path("reports/p/workers-%j.log")}
    return batch_script(site, command, **options | changes).splitlines()


def run_line(script: list[str]) -> str:
    return next(line for line in script if line.startswith("srun "))


def test_what_the_cluster_wants_said_is_said():
    script = script_of(["autotune", "workers"])
    assert script[0] == "#!/bin/bash"
    for line in (
        "#SBATCH --job-name=workers-tiny",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --gres=gpu:h100:2",
        "#SBATCH --time=01:00:00",
        "#SBATCH --account=project1",
        "#SBATCH --partition=gpu",
        "#SBATCH --output=reports/p/workers-%j.log",
    ):
        assert line in script


def test_directives_come_before_any_command():
    script = script_of(["autotune"])
    last = max(number for number, line in enumerate(script) if line.startswith("#SBATCH"))
    first = min(number for number, line in enumerate(script) if line and not line.startswith("#"))
    assert last < first


def test_without_gpus_none_are_asked_for_and_without_a_spelling_the_usual_one_is_used():
    assert not any("--gres" in line for line in script_of(["autotune"], gpus=0))
    assert "#SBATCH --gres=gpu:3" in script_of(["autotune"], SiteFile(), gpus=3)


def test_what_a_site_does_not_say_is_left_to_the_cluster():
    script = script_of(["autotune"], SiteFile())
    for option in ("account", "partition", "constraint", "exclude"):
        assert not any(f"--{option}=" in line for line in script)


def test_the_prologue_runs_before_the_command_and_the_prefix_right_before_it():
    script = script_of(["autotune", "workers"])
    assert script.index("module load python/3.11") < script.index("export LANG=C") < script.index(run_line(script))
    assert run_line(script).endswith(" apptainer exec --nv image.sif autotune workers")


def test_the_step_is_told_its_cpus_which_it_does_not_inherit():
    assert run_line(script_of(["autotune"])).startswith('srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ')


ODD = ["autotune", "workers", "--profile", "my profiles/$HOME/`id`.toml", "--data", "a'b\\c;rm -rf *", "&", "é\n"]


def test_arguments_survive_the_shell_as_they_are():
    text = "\n".join(script_of(ODD, SiteFile()))
    inner = text[text.index("\nsrun ") :]
    assert shlex.split(inner)[2:] == ODD


def test_a_shell_expands_nothing_in_the_arguments(tmp_path):
    said = tmp_path / "said"
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nshift\nprintf "%s\\0" "$@" > {said}\n')
    srun.chmod(0o755)
    script = batch_script(SiteFile(), ODD, name="n", gpus=0, cpus=1, log=Path("log"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "1", "HOME": "/home/x"}
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=tmp_path)
    assert said.read_text().split("\0")[:-1] == ODD


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Puts a scripted sbatch on PATH."""

    def put(body: str) -> None:
        place = tmp_path / "bin"
        place.mkdir()
        (place / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
        (place / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")

    return put


def test_a_submitted_script_gives_the_jobs_id(sbatch, tmp_path):
    sbatch(f'echo "$@" > {tmp_path}/said; echo "4711;cluster1"')
    script = tmp_path / "job script.sbatch"
    assert submit(script) == "4711"
    assert (tmp_path / "said").read_text() == f"--parsable {script}\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [("echo 'Invalid account' >&2; exit 1", "Invalid account"), ("echo soon", "soon"), ("exit 1", "")],
)
def test_a_refusal_is_told_with_the_script_to_change(sbatch, tmp_path, body, words):
    sbatch(body)
    with pytest.raises(MachineLacks, match=f"refused the job: {words}") as refused:
        submit(tmp_path / "job.sbatch")
    assert f"sbatch {tmp_path / 'job.sbatch'}" in refused.value.next_step


def test_without_slurm_the_script_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineLacks, match="sbatch is not here") as refused:
        submit(tmp_path / "job.sbatch")
    assert str(tmp_path / "job.sbatch") in refused.value.next_step
