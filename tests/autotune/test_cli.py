"""Bad input: one clear message, what to do next, its exit code, no traceback, nothing
half-written."""

import errno
import subprocess
import sys

import pytest

from autotune import cli
from autotune.cli import run
from trainer.formats import errors


def test_denied_file_is_no_traceback(monkeypatch, capsys):
    def deny(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "reports/a b")

    monkeypatch.setattr(cli, "application", lambda _: deny)
    assert cli.run(["status"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: cannot use reports/a b: Permission denied\n")
    assert "namei -l 'reports/a b'" in error


def test_error_on_a_terminal_breaks_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    message = "the rate is 12 sequence/s, not 13 sequence/s"
    command = "Run again: autotune tune --model m --data d"
    piped = f"error: {message}\n  next: {command}\n"
    assert errors.error_text(message, command) == piped
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert errors.error_text(message, command).splitlines() == [
        "error: the rate is 12",
        "  sequence/s, not 13",
        "  sequence/s",
        # The command can be copied.
        f"  next: {command}",
    ]


@pytest.fixture
def workdir(workdir, monkeypatch):
    """On a node of a job, which may measure wherever SLURM's commands are installed."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return workdir


@pytest.fixture
def refused(workdir, capsys):
    """Call a command that is to be refused with an exit code and words, and to write
    nothing."""

    def call(*arguments, code, words):
        before = sorted(workdir.rglob("*"))
        assert run([str(word) for word in arguments]) == code
        out, err = capsys.readouterr()
        assert out == ""
        for word in words:
            assert word in err
        assert "Traceback" not in err
        assert sorted(workdir.rglob("*")) == before

    return call


PROBE = ["probe", "--model", "m", "--data", "d"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["probe", "--model", "bert-mnii", "--data", "d"],
            3,
            ["unknown model", "'bert-mini'"],
        ),
        (
            ["probe", "--model", "bert-mini", "--data", "."],
            3,
            ["not a dataset", "autotune data prepare"],
        ),
        (
            ["probe", "--model", "bert-mini", "--data", "nowhere"],
            3,
            ["dataset not found: nowhere"],
        ),
        (["report", "p.toml", "--run", "nowhere"], 3, ["nowhere is not a run"]),
        (
            ["prob"],
            2,
            [
                "error: autotune has no command 'prob'\n  next: Did you mean autotune"
                " probe?"
            ],
        ),
        (["profile", "aprove"], 2, ["next: Did you mean autotune profile approve?"]),
        (
            ["probe"],
            2,
            [
                "autotune probe requires --model\n  next: autotune probe --model"
                " bert-120m --data"
            ],
        ),
        (
            ["probe", "--zzz"],
            2,
            ["autotune probe has no option '--zzz'\n  next: See: autotune probe -h"],
        ),
        (["probe", "--modle=m"], 2, ["next: Did you mean --model?"]),
        (["probe", "--model"], 2, ["--model requires a value"]),
        (["doctor", "--json=1"], 2, ["--json takes no value"]),
        (["doctor", "a"], 2, ["autotune doctor: unexpected arguments (a)"]),
        ([*PROBE, "--strategy", "zero"], 2, ["Did you mean --strategy zero1?"]),
        (
            [*PROBE, "--seq-length", "many"],
            2,
            ["--seq-length 'many': it should be a valid integer"],
        ),
        (
            [*PROBE, "--seq-length", "2"],
            2,
            ["--seq-length '2': it should be greater than or equal to 8"],
        ),
    ],
)
def test_misspelt_or_missing_names_get_a_next_step(refused, arguments, code, words):
    refused(*arguments, code=code, words=words)


@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--memory", "900TB"], 3, ["exceeds", "at most"]),
        (["--memory", "1GiB", "--out", "bin/p.toml"], 3, ["cannot write"]),
        (["--model", "bert-small", "--out", "q.toml"], 2, ["2 profiles", "directory"]),
    ],
)
def test_impossible_probe_is_rejected_before_a_trial(
    refused, workdir, patterned_dataset, options, code, words
):
    (workdir / "bin").write_text("")
    probe = [
        "probe",
        "--model",
        "bert-mini",
        "--data",
        patterned_dataset,
        "--device",
        "cpu",
    ]
    refused(*probe, *options, code=code, words=words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "micro_batch_size = 2",
            "micro_batch_row = 2",
            ("unknown key", "'micro_batch_size'"),
        ),
        (
            "schema_version = 3",
            "schema_version = 1",
            ("schema version 1", "autotune tune"),
        ),
        ("micro_batch_size = 2", "micro_batch_size = 0", ("micro_batch_size = 0",)),
        ("micro_batch_size = 2", "micro_batch_size = = 2", ("not valid TOML",)),
    ],
)
@pytest.mark.parametrize("command", [["workers"], ["profile", "show"], ["report"]])
def test_a_broken_profile_is_refused_by_every_command(
    refused, workdir, old, new, words, command
):
    (workdir / "p.toml").write_text(
        (workdir / "p.toml").read_text().replace(old, new, 1)
    )
    refused(*command, "p.toml", code=3, words=words)


@pytest.mark.usefixtures("warm_server")
def test_workers_refuses_a_profile_of_another_dataset(refused, patterned_dataset):
    words = ["dataset_hash", "autotune probe --model CONFIG.json"]
    refused("workers", "p.toml", "--data", patterned_dataset, code=6, words=words)


LINES = (["--help"], ["doctor"], ["probe", "--help"], ["report", "--help"])


@pytest.mark.parametrize(
    ("does", "heavy"),
    [
        *(
            (
                f"from autotune.cli import run; code = run({line!r})",
                "torch transformers optuna",
            )
            for line in LINES
        ),
        (
            "import autotune.doctor.command",
            "torch transformers numpy optuna psutil pynvml rich",
        ),
        (
            "import autotune.corpus.command",
            "numpy tokenizers capstone distributed pyarrow torch",
        ),
    ],
)
def test_command_loads_nothing_heavy_too_early(workdir, does, heavy):
    code = (
        f"import sys; code = 0; {does}; sys.exit(code or str(set({heavy.split()}) &"
        " set(sys.modules) or '') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=workdir,
    )
    assert done.returncode == 0, done.stderr


def test_quoted_file_cannot_steer_the_terminal(refused, says, workdir):
    (workdir / "p.toml").write_text(
        'schema_version = 3\n"\\u001b[2Jx\\u202e" = 1\n[subject]\n'
    )
    refused("profile", "show", "p.toml", code=3, words=["unknown key", "[2Jx"])
    err = says("profile", "show", "p\x1b[2J.toml", code=3)
    assert "\x1b" not in err
    assert "p\\x1b[2J.toml" in err
