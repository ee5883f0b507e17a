"""The commands on your own code: examples of three libraries, and wrong turns."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from autotune.subjects.own.subject import FunctionSubject

EXAMPLES = Path(__file__).parents[4] / "examples"
pytestmark = pytest.mark.system


@pytest.fixture
def examples(workdir) -> Path:
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, workdir)
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_probes_an_example_until_out_of_memory(says, examples, name):
    printed = json.loads(
        says(
            "probe",
            "--step",
            f"{name}:build_step",
            "--memory",
            "300MB",
            "--here",
            "--json",
        )
    )
    step = printed["profiles"][0]["evidence"]["probe"]
    assert step["infeasible_min"] == step["feasible_max"] + 1
    assert step["trains"] == (name != "accelerate_token_classifier")
    assert step["optimizer_steps"] == 3


def test_profile_goes_from_probe_to_approval(says, workdir):
    shutil.copy(Path(__file__).with_name("hostile.py"), workdir)
    probe = (
        "probe",
        "--step",
        "hostile:behaves",
        "--memory",
        "100MB",
        "--set",
        "seq_length=64,128",
        "--here",
    )
    text = says(*probe)
    assert (
        "next: autotune workers profiles/hostile-behaves-seq_length-64-cpu.toml"
        " --loader" in text
    )
    short, long = (
        Path(f"profiles/hostile-behaves-seq_length-{length}-cpu.toml")
        for length in (64, 128)
    )
    sizes = [
        tomllib.loads(path.read_text())["evidence"]["probe"]["feasible_max"]
        for path in (short, long)
    ]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.1)
    workers = (
        "workers",
        short,
        "--loader",
        "hostile:sleepy",
        "--time-limit",
        "40s",
        "--window",
        "0.2s",
    )
    assert "your step" in says(*workers, "--max-workers", "1", "--here")
    tables = tomllib.loads(short.read_text())
    assert tables["subject"]["table"]["loader_function"] == "hostile:sleepy"
    assert {"step", "loader"} == set(tables["subject"]["sources"])
    assert {"micro_batch_size", "num_workers"} == set(tables["settings"])
    assert "hostile:behaves, hostile:sleepy" in says("profile", "show", short)
    explained = says("profile", "show", short, "--explain")
    assert "out of memory" in says("profile", "show", short, "micro_batch_size")
    assert "an argument that you set" in explained
    verified = says("profile", "verify", short)
    assert "subject.sources.step" in verified
    assert "all rates match trials" in verified
    says("profile", "approve", short, "--by", "me")
    assert (
        json.loads(says("profile", "show", short, "--json"))["approval"] == "approved"
    )
    says("profile", "verify", short, "--require-approved")
    assert json.loads(says("profile", "export", short, "--to", "hf-trainer"))[
        "dataloader_num_workers"
    ] in (0, 1)
    assert "all are code for your program" in says(
        "profile", "export", short, "--to", "accelerate", "--out", "a.json"
    )
    assert not Path("a.json").exists()
    page = Path(
        says("report", short, long, "--json") and f"reports/{short.stem}/report.html"
    ).read_text()
    assert "hostile:behaves (seq_length=64)" in page
    assert "Memory by micro_batch_size" in page
    compared = says("compare", short, long)
    assert "largest micro_batch_size" in compared
    assert "seq_length" in compared
    assert "Quality" in says("report", short, "--format", "pr")
    says(*probe)  # resumes: the same profile, with what was measured of its loader
    assert tomllib.loads(short.read_text())["evidence"].keys() == {"probe", "workers"}
    # The profile has the loader now.
    assert "your step" in says(
        *("workers", short, "--time-limit", "40s", "--window", "0.2s"),
        *("--max-workers", "1", "--here"),
    )
    advised = says("advise", short)
    assert "Bottleneck: " in advised
    assert "not judged: kernels" in advised
    assert "samples/s of all" in says("plan", short, "--samples", "1M")
    short.write_text(short.read_text().replace("num_workers = ", "num_workers = 1", 1))
    assert "voided" in says("profile", "approve", short)
    message = says("train", short, code=7)
    assert "autotune train requires settings of the bundled trainer" in message
    assert "Add your own loader" in says("workers", long, code=7)


def test_traces_own_model_before_trials(says, workdir):
    (workdir / "modelled.py").write_text(
        "import torch\ndef build_model(micro_batch_size):\n    model ="
        " torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))\n   "
        " return model, torch.ones(64 * micro_batch_size, 512)\ndef"
        " build_step(micro_batch_size, device):\n    model, batch ="
        " build_model(micro_batch_size)\n    optimizer ="
        " torch.optim.AdamW(model.parameters())\n    def step():\n       "
        " model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()\n   "
        " return step\n"
    )
    printed = json.loads(
        says(
            "probe",
            "--step",
            "modelled:build_step",
            "--memory",
            # Large beside what the trace cannot know: stacks of as many threads as the
            # machine has cores, and buffers of its matrix products.
            "200MB",
            "--here",
            "--json",
        )
    )
    step = printed["profiles"][0]["evidence"]["probe"]
    assert step["not_traced"] is None
    assert step["traced_micro_batch_size"] == pytest.approx(
        step["feasible_max"], rel=0.15
    )


WRONG_TURNS = [
    (("probe",), 2, "autotune probe requires --model"),
    (("probe", "--step", "hostile"), 2, "'hostile' does not name a function"),
    (
        ("probe", "--step", "a:b", "--model", "bert-mini"),
        2,
        "--model cannot be used with your own code",
    ),
    (("probe", "--step", "a:b", "--set", "3"), 2, "--set '3' is not NAME=VALUE"),
    (
        ("probe", "--step", "no_such_module:b", "--here"),
        3,
        "module 'no_such_module' not found in",
    ),
    (
        ("probe", "--step", "broken:b", "--here"),
        3,
        "cannot import 'broken': ZeroDivisionError",
    ),
    (
        ("probe", "--step", "leaves:b", "--here"),
        3,
        "cannot import 'leaves': SystemExit: 3",
    ),
    (
        ("probe", "--step", "vanishes:b", "--here"),
        3,
        "importing vanishes ended its process",
    ),
    (
        ("probe", "--step", "asks:other_names", "--here"),
        3,
        "requires bs, dev\n  next: Arguments are given by name",
    ),
    (
        ("probe", "--step", "asks:build_step", "--along", "n", "--here"),
        3,
        "but it requires micro_batch_size",
    ),
    (
        ("probe", "--step", "asks:build_step", "--set", "typo=3", "--here"),
        3,
        "none of asks:build_step takes typo",
    ),
    # Your own module 'trainer' is imported, not the trainer of this project.
    (
        ("probe", "--step", "trainer:build_step", "--here"),
        3,
        "trainer:build_step returned NoneType",
    ),
    (
        ("probe", "--step", "uses:build_step", "--here"),
        3,
        "uses:build_step returned NoneType",
    ),
    (
        ("probe", "--subject", "transformers", "--here"),
        2,
        "autotune probe --step my_module:build_step --subject",
    ),
    (("workers",), 2, "autotune workers requires PROFILE"),
    (("workers", "--loader", "a:b"), 2, "nothing consumes the batches"),
    (("workers", "--step", "a:b"), 2, "--step needs a loader"),
    (("workers", "--set", "a=1"), 2, "--set applies to your own code"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    WRONG_TURNS,
    ids=[" ".join(arguments) for arguments, _, _ in WRONG_TURNS],
)
def test_wrong_turns_name_the_next_step(says, workdir, arguments, code, words):
    (workdir / "broken.py").write_text("1 / 0")
    (workdir / "leaves.py").write_text("import sys; sys.exit(3)")
    (workdir / "vanishes.py").write_text("import os; os._exit(0)")
    (workdir / "trainer.py").write_text("def build_step(micro_batch_size): ...")
    (workdir / "uses.py").write_text("from trainer import build_step")
    (workdir / "asks.py").write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
        "def build_step(micro_batch_size, device): ...\ndef other_names(bs, dev): ...\n"
    )
    message = says(*arguments, code=code)
    assert words in message
    assert "next: " in message


def test_argument_values_make_no_paths():
    code = FunctionSubject(
        step_function="a:b", arguments={"path": "../../x", "long": "y" * 300}
    )
    assert "/" not in code.name
    assert len(code.name) < 120
    assert (
        code.name
        != code.model_copy(
            update={"arguments": {"path": ".._x", "long": "y" * 300}}
        ).name
    )
