"""Answers of commands with ``--json``, read back as the type that declares them."""

import json
from pathlib import Path

import pytest
import typer
from pydantic import TypeAdapter

from autotune.base import answer_json
from autotune.cli import application, run
from tests.autotune.compare.test_command import _write_run

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SHIPPED = str(min(Path("profiles").resolve().glob("*-cpu.toml")))
QUICK = [
    "doctor",
    "data inspect data",
    "data stage data --to local",
    "profile show p.toml",
    "compare p.toml q.toml",
    f"compare p.toml {SHIPPED} q.toml",
    "profile verify p.toml",
    "profile show p.toml --explain",
    f"profile show {SHIPPED} --explain",
    "advise p.toml",
    "advise p.toml --apply",
    "advise runs/a",
    "advise --rules",
    "report p.toml --run runs/a",
    "compare runs/a runs/b --fail-if-slower 50%",
    "profile approve p.toml --reject --by reviewer --note why",
    "status",
    "profile export p.toml --to hf-trainer",
    f"profile export {SHIPPED} --to hf-trainer",
    f"network --predict {SHIPPED} --bandwidth 25Gbit --nodes 1,2",
    f"plan {SHIPPED} --tokens 1M",
    "estimate --model bert-mini --memory 1GiB --device cpu --seq-length 32 --data data",
]
MADE = ["data prepare text:text --out made", "data verify made"]
SUBMITTED = ["workers p.toml --slurm", "train p.toml --out runs/c --slurm"]
_SHAPE = (
    "--model tiny.json --data data --device cpu --memory 256MiB --seq-length 32"
    " --max-micro-batch-size 4"
)
_BRIEFLY = "tiny.toml --data data --window 0.2s --time-limit 3min"
MEASURED = [
    f"probe {_SHAPE} --out tiny.toml",
    f"workers {_BRIEFLY}",
    f"confirm {_BRIEFLY}",
    f"baseline {_BRIEFLY}",
    (
        f"tune {_SHAPE} --window 0.2s --time-limit 0.2min --skip network --skip"
        " baseline --out tuned"
    ),
]


def _commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        elif any("--json" in option.opts for option in command.params):
            yield " ".join((*path, name))


def test_covers_every_command_with_json():
    lines = [*QUICK, *MADE, *SUBMITTED, *MEASURED]
    known = set(_commands(typer.main.get_command(application())))
    assert {
        name for name in known if any(line.startswith(name) for line in lines)
    } == known


@pytest.fixture
def workdir(workdir_with_data):
    """A directory with data, a profile of this machine, another one, and two runs."""
    text = (workdir_with_data / "p.toml").read_text()
    (workdir_with_data / "q.toml").write_text(
        text.replace("micro_batch_size = 2", "micro_batch_size = 1")
    )
    _write_run("runs/a", 1000)
    _write_run("runs/b", 900, seed=1)
    (workdir_with_data / "local").mkdir()
    (workdir_with_data / "text").mkdir()
    (workdir_with_data / "text" / "a.txt").write_text(
        "".join(f"word{number} and more\n" for number in range(300))
    )
    return workdir_with_data


@pytest.fixture
def answered(capsys, monkeypatch):
    """Return a function that runs a command and validates its JSON by its type."""
    given = []
    plain = answer_json.jsonable
    monkeypatch.setattr(
        answer_json, "jsonable", lambda answer: given.append(answer) or plain(answer)
    )

    def run_and_check(line):
        assert run([*line.split(), "--json"]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        answer = given.pop()
        kind = (
            tuple[type(answer[0]), ...]
            if isinstance(answer, tuple | list)
            else type(answer)
        )
        adapter = TypeAdapter(kind)
        value = json.loads(text)
        for name in ("schema_version", "tool_version"):
            del value[name]
        assert adapter.dump_python(adapter.validate_python(value), mode="json") == value
        return value

    return run_and_check


@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("line", QUICK)
def test_answer_matches_its_type(workdir, answered, line):
    assert answered(line)


def test_answers_about_new_dataset_match_their_types(workdir, answered, request):
    for line in MADE:
        assert answered(line)
    request.getfixturevalue("sbatch")
    assert [answered(line).get("jobs", "1") for line in SUBMITTED] == ["1", ["2"]]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_server")
def test_answers_of_measurements_match_their_types(workdir, answered, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no sbatch: this is no login node
    (workdir / "tiny.json").write_text(json.dumps(TINY))
    for line in MEASURED:
        assert answered(line)
