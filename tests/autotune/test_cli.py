"""Bad input: one clear message, what to do next, its exit code, no traceback, nothing half-written."""

import subprocess
import sys

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile


@pytest.fixture
def here(tmp_path, monkeypatch, in_a_job):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    return tmp_path


@pytest.fixture
def in_a_job(monkeypatch):
    """A node of a job, which may measure wherever SLURM's commands are installed."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")


@pytest.fixture
def profile(here):
    path = here / "p.toml"
    path.write_text(profile_to_toml(example_profile()))
    return path


def _refused(capsys, here, arguments: list[str], code: int, *words: str) -> None:
    before = sorted(here.rglob("*"))
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert sorted(here.rglob("*")) == before


def test_an_unknown_model_suggests_the_nearest(capsys, here):
    _refused(capsys, here, ["probe", "--model", "bert-mnii", "--data", "d"], 3, "unknown model", "'bert-mini'")


def test_a_directory_that_is_no_dataset_says_how_to_make_one(capsys, here):
    _refused(
        capsys, here, ["probe", "--model", "bert-mini", "--data", "."], 3, "not a dataset", "autotune data prepare"
    )


def test_a_missing_dataset_directory_is_named(capsys, here):
    _refused(capsys, here, ["probe", "--model", "bert-mini", "--data", "nowhere"], 3, "nowhere is not a directory")


def test_cuda_without_a_gpu_says_so_and_what_else_there_is(capsys, here, patterned_dataset):
    if run(["doctor"]) == 0 and "none:" not in capsys.readouterr().out:
        pytest.skip("this machine has the driver's library")
    arguments = ["probe", "--model", "bert-mini", "--data", str(patterned_dataset), "--device", "cuda"]
    _refused(capsys, here, arguments, 5, "no GPU here", "--device cpu")


@pytest.mark.parametrize("size", ["5XB", "lots", "-1GB"])
def test_a_size_that_is_none_is_refused(capsys, here, patterned_dataset, size):
    arguments = ["probe", "--model", "bert-mini", "--data", str(patterned_dataset), "--memory", size]
    _refused(capsys, here, arguments, 3, size, "GiB (binary)")


@pytest.mark.usefixtures("warm_server")
def test_more_memory_than_there_is_is_refused(capsys, here, patterned_dataset):
    arguments = [
        "probe",
        "--model",
        "bert-mini",
        "--data",
        str(patterned_dataset),
        "--device",
        "cpu",
        "--memory",
        "900TB",
    ]
    _refused(capsys, here, arguments, 3, "more than", "at most")


@pytest.mark.usefixtures("warm_server")
def test_an_unwritable_place_for_the_profile_is_refused_before_a_trial(capsys, here, patterned_dataset):
    (here / "file").write_text("")
    arguments = ["probe", "--model", "bert-mini", "--data", str(patterned_dataset), "--device", "cpu",
                 "--memory", "1GiB", "--out", "file/p.toml"]  # fmt: skip
    _refused(capsys, here, arguments, 3, "cannot write")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("micro_batch_rows", "micro_batch_row", ("unknown key", "'micro_batch_rows'")),
        ("schema_version = 1", "schema_version = 2", ("schema version 2", "autotune probe")),
        ("\n[train]\n", "\n[trian]\n", ("'train'",)),
        ("micro_batch_rows = 2", "micro_batch_rows = 0", ("micro_batch_rows = 0",)),
        ("micro_batch_rows = 2", "micro_batch_rows = = 2", ("not valid TOML",)),
    ],
)
@pytest.mark.parametrize("command", [["workers", "--profile"], ["profile", "show"], ["report", "build"]])
def test_a_broken_profile_is_refused_by_every_command(capsys, here, profile, old, new, words, command):
    profile.write_text(profile.read_text().replace(old, new, 1))
    _refused(capsys, here, [*command, str(profile)], 3, *words)


def test_workers_refuses_a_profile_that_was_not_probed(capsys, here, profile):
    text = profile.read_text()
    profile.write_text(text[: text.index("[evidence.probe]")] + "[evidence]\n")
    _refused(
        capsys,
        here,
        ["workers", "--profile", str(profile)],
        6,
        "no probed micro-batch",
        "autotune probe --model CONFIG.json",
    )


@pytest.mark.usefixtures("warm_server")
def test_workers_refuses_a_profile_of_another_machine(capsys, here, profile, patterned_dataset):
    arguments = ["workers", "--profile", str(profile), "--data", str(patterned_dataset)]
    _refused(capsys, here, arguments, 6, "dataset_hash", "autotune probe --model CONFIG.json")


def test_a_run_that_does_not_exist_is_refused(capsys, here, profile):
    _refused(capsys, here, ["report", "build", str(profile), "--run", "nowhere"], 3, "nowhere is not a run")


@pytest.mark.parametrize(
    "arguments", [["prob"], ["probe"], ["probe", "--zzz"], ["probe", "--model"], ["report", "bild"]]
)
def test_a_wrong_command_line_is_a_usage_error(capsys, here, arguments):
    _refused(capsys, here, arguments, 2, "Error:")


@pytest.mark.usefixtures("warm_server")
def test_two_models_for_one_file_are_a_usage_error(capsys, here, patterned_dataset):
    arguments = ["probe", "--model", "bert-mini", "--model", "bert-small", "--data", str(patterned_dataset),
                 "--device", "cpu", "--out", "p.toml"]  # fmt: skip
    _refused(capsys, here, arguments, 2, "2 models", "directory")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["probe", "--help"], ["report", "build", "--help"]])
def test_the_process_never_imports_torch(here, arguments):
    code = (
        "import sys\nfrom autotune.cli import run\n"
        f"code = run({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'optuna'} & set(sys.modules)\n"
        "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("doctor", "data", "probe", "workers", "profile", "report"):
        assert command in out


def test_a_file_that_an_error_quotes_cannot_steer_the_terminal(capsys, here):
    (here / "p.toml").write_text('schema_version = 1\n"\\u001b[2Jx\\u202e" = 1\n[train]\n')
    _refused(capsys, here, ["profile", "show", "p.toml"], 3, "unknown key", "[2Jx")
    assert run(["profile", "show", "p\x1b[2J.toml"]) == 3
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "p\\x1b[2J.toml" in err
