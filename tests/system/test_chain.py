"""The whole chain on real input: dataset, tune, train, advise, report.

Programs of this machine, real limits, real ranks, real transformers; each command as
you type it.
"""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from testbed.simulators.trainings import write_settings
from trainer.formats.presets import PRESETS
from trainer.formats.run_record import read_run

pytestmark = pytest.mark.system

MEASURED = ["--data", "data", "--device", "cpu", "--here", "--seq-length", "64"]
PROBE = ["probe", *MEASURED]
MODEL = [
    *("--model", "bert-mini", "--memory", "256MiB", "--global-batch-tokens", "1500"),
    "--json",
]


def autotune(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Run a command; return its output, or its errors if it is to fail with a code."""
    command = [sys.executable, "-m", "autotune", *arguments]
    ended = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def torchrun(
    ranks: int, *arguments: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "trainer",
    ]
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def data(work) -> Path:
    command = [
        "data",
        "prepare",
        "elf:/usr/bin",
        "--out",
        "data",
        "--max-samples",
        "800",
        "--json",
    ]
    prepared = json.loads(autotune(*command, cwd=work))
    assert prepared["samples"] + prepared["validation_samples"] == 800
    return work / "data"


@pytest.fixture(scope="module")
def tuning(work, data) -> dict:
    """A tuning with little time; ``test_capabilities`` has each phase alone."""
    skipped = [f"--skip={phase}" for phase in ("workers", "network", "baseline")]
    limits = ["--time-limit", "80s", "--window", "0.2s"]
    return json.loads(autotune("tune", *MEASURED, *MODEL, *limits, *skipped, cwd=work))


@pytest.fixture(scope="module")
def probed(work, tuning) -> dict:
    """The probe of the tuning again, which completes it if its time was too short."""
    [probed] = json.loads(autotune(*PROBE, *MODEL, cwd=work))["profiles"]
    return probed


@pytest.fixture(scope="module")
def probe(probed) -> dict:
    """The evidence of the probe."""
    return probed["evidence"]["probe"]


@pytest.fixture(scope="module")
def profile(work, probed) -> Path:
    return work / probed["profile"]


@pytest.fixture(scope="module")
def run(work, data, profile) -> Path:
    arguments = ["train", str(profile), "--ranks", "2", "--out", "runs/two"]
    for setting in ("max_steps=16", "warmup_steps=2", "learning_rate=1e-3"):
        arguments += ["--set", f"train.{setting}"]
    autotune(*arguments, cwd=work)
    return work / "runs" / "two"


def test_tuning_ends_with_a_report(work, tuning, probed):
    statuses = {stage["name"]: stage["status"] for stage in tuning["stages"]}
    assert statuses["probe"] == statuses["report"] == "done"
    assert statuses["workers"] == statuses["baseline"] == "skipped"
    assert tuning["profiles"] == [probed["profile"]]
    assert (work / tuning["report"]).is_file()


def test_probe_finds_the_largest_micro_batch(probed, probe):
    largest = probe["feasible_max"]
    assert probe["infeasible_min"] == largest + 1
    outcomes = {
        (trial["size"], trial["outcome"]["kind"]): trial["outcome"]
        for trial in probed["trials"]
    }
    assert outcomes[largest, "measured"]["figures"]["optimizer_steps"] >= 2
    memory_message = outcomes[largest + 1, "out_of_memory"]["detail"]
    assert re.search("can't allocate memory|bad_alloc", memory_message)
    assert probe["feasible_peak_bytes"] <= 256 * 2**20


def test_second_probe_reuses_all_trials(work, probe):
    [again] = json.loads(autotune(*PROBE, *MODEL, cwd=work))["profiles"]
    assert all(trial["from_trial_log"] for trial in again["trials"])
    assert again["evidence"]["probe"]["feasible_max"] == probe["feasible_max"]


def test_profile_keeps_the_probes_answer(work, probed, probe, profile):
    text = profile.read_text()
    tables = tomllib.loads(text)
    size = probed["train"]["micro_batch_size"]
    assert tables["train"]["micro_batch_size"] == size <= probe["feasible_max"]
    assert tables["evidence"]["probe"]["feasible_max"] == probe["feasible_max"]
    assert tables["train"]["data"]["path"] == "../data"
    assert str(work) not in text


def test_two_ranks_train_from_the_profile(run):
    steps = [
        json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == list(range(1, 17))
    assert sum(step["loss"] for step in steps[-3:]) / 3 < 0.8 * steps[0]["loss"]
    header = json.loads((run / "run.json").read_text())
    assert header["world_size"] == 2
    assert header["sources"]["train.max_steps"] == "command line"
    end = json.loads((run / "exit.json").read_text())
    assert end["exit_code"] == 0
    assert end["steps"] == 16


def test_tensorboard_has_every_step(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 17))


def test_transformers_loads_the_trained_model(run):
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    model = AutoModelForMaskedLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer("push rbp [NEXT]")["input_ids"][0] == tokenizer.cls_token_id
    fill_mask = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    guesses = fill_mask(f"push rbp [NEXT] {tokenizer.mask_token} rbp,rsp [NEXT]")
    assert len(guesses) == 5
    for guess in guesses:
        assert 0 < guess["score"] <= 1
        assert guess["token_str"]


def test_advice_names_what_limits_the_run(work, profile, run):
    advised = json.loads(autotune("advise", str(run), str(profile), "--json", cwd=work))
    shares = [part["share"] for part in advised["bottleneck"]["parts"]]
    assert sum(shares) == pytest.approx(1, abs=0.05)
    assert all(advice["claim"] for advice in advised["advice"])


def test_report_shows_the_probe_with_the_run(work, profile, run, probe):
    output = autotune(
        "report", str(profile), "--run", str(run), "--data", "data", "--json", cwd=work
    )
    paths = json.loads(output)
    markdown = (work / paths["markdown"]).read_text()
    largest = probe["feasible_max"]
    too_large = probe["infeasible_min"]
    assert (
        f"| largest micro_batch_size, verified | {largest} sequences of 64 tokens |"
        in markdown
    )
    assert f"| smallest micro_batch_size out of memory | {too_large} |" in markdown
    assert "autotune baseline " in markdown
    assert "| two | bert-mini-cpu | finished | 2 | 16 |" in markdown
    facts = json.loads((work / paths["json"]).read_text())
    assert facts["runs"][0]["profile"] == str(profile)
    dataset = facts["profiles"][0]["dataset"]
    assert dataset["train_samples"] + dataset["validation_samples"] == 800
    assert (work / paths["html"]).read_text().count("<svg") >= 4


def test_rejects_budget_below_one_sequence(work, data):
    error = autotune(
        *PROBE,
        "--model",
        "bert-mini",
        "--memory",
        "8MiB",
        "--out",
        "no.toml",
        cwd=work,
        code=4,
    )
    assert "bert-mini exceeds the memory budget" in error
    assert "at 1 sequence" in error
    assert "Raise --memory" in error
    assert not (work / "no.toml").exists()


@pytest.mark.slow
def test_trains_a_model_of_your_own(work, data):
    config = {
        "model_type": "esm",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 66,
    }
    (work / "mine").mkdir()
    (work / "mine" / "config.json").write_text(json.dumps(config))
    arguments = [*PROBE, "--model", "mine/config.json", "--memory", "64MiB", "--json"]
    [probed] = json.loads(autotune(*arguments, cwd=work))["profiles"]
    assert probed["subject"]["name"] == "mine"
    probe = probed["evidence"]["probe"]
    assert probe["infeasible_min"] == probe["feasible_max"] + 1
    too_long = autotune(*arguments, "--seq-length", "66", cwd=work, code=3)
    assert "65 positions" in too_long
    # ESM has parameters that the loss does not depend on, which must not stop the
    # ranks.
    ended = torchrun(
        2,
        probed["profile"],
        "--data",
        "data",
        "--set",
        "train.max_steps=2",
        "--set",
        "train.global_batch_size=4",
        "--out",
        "runs/mine",
        cwd=work,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "layers", "width"), [("bert-120m", 12, 768), ("bert-350m", 24, 1024)]
)
def test_preset_of_full_size_learns(work, data, model, layers, width):
    from transformers import AutoModelForMaskedLM

    profile = write_settings(
        work / f"{model}.toml",
        model={"name": model, "config": PRESETS[model]},
        seq_length_tokens=512,
        max_steps=20,
        micro_batch_size=2,
        global_batch_size=2,
        warmup_steps=2,
        learning_rate=1e-4,
        schedule="constant",
    )
    out = work / "runs" / model
    command = [
        sys.executable,
        "-m",
        "trainer",
        str(profile),
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=7200
    )
    assert ended.returncode == 0, ended.stderr
    steps = read_run(out).steps
    assert [row.step for row in steps] == list(range(1, 21))
    assert all(math.isfinite(row.loss) for row in steps)
    assert all(math.isfinite(row.grad_norm) for row in steps)
    assert sum(row.non_padding_tokens for row in steps) > 0.9 * 20 * 1024
    # A model that knows nothing has the logarithm of the vocabulary's size as its loss.
    vocab_size = json.loads((data / "manifest.json").read_text())["vocab_size"]
    assert steps[0].loss == pytest.approx(math.log(vocab_size), rel=0.05)
    assert sum(row.loss for row in steps[-3:]) / 3 < 0.85 * steps[0].loss
    per_layer = 4 * (width**2 + width) + 8 * width**2 + 5 * width + 4 * width
    embeddings = (vocab_size + 512 + 2 + 2) * width
    head = width**2 + 3 * width + vocab_size
    parameters = layers * per_layer + embeddings + head
    exported = AutoModelForMaskedLM.from_pretrained(out / "model")
    header = json.loads((out / "run.json").read_text())
    assert exported.num_parameters() == parameters
    assert header["parameters"] == parameters
