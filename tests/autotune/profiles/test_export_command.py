"""Exports are loaded by the real libraries, in child processes.

This process never imports them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ParallelSettings,
)
from trainer.distributed.optimizer import learning_rate

SHIPPED = sorted(Path("profiles").resolve().glob("*.toml"))
CUDA = {"device": "cuda", "precision": "bf16"}
BUCKETED = {"layout": "bucketed", "activation_checkpointing": "selective"}
VARIANTS = {
    "fsdp2": (
        CUDA
        | {
            "parallel": ParallelSettings(strategy="fsdp2"),
            "activation_checkpointing": "full",
        }
    ),
    "zero1": {
        "parallel": ParallelSettings(
            strategy="zero1", bucket_cap_mib=100, static_graph=True
        )
    },
    "compile": {
        "compile": True,
        "data": DataSettings(num_workers=2, prefetch_factor=4),
    },
    "bucketed": BUCKETED | {"evaluation": EvaluationSettings(interval_steps=9)},
    "tf32": {
        "device": "cuda",
        "tf32": True,
        "checkpoint": CheckpointSettings(enabled=False),
    },
    "wsd": {"schedule": "wsd", "final_learning_rate_share": 0.1},
    "wsd-long": {"schedule": "wsd", "decay_share": 1.0},
    "cosine": {"schedule": "cosine"},
    "cosine-to-share": {"schedule": "cosine", "final_learning_rate_share": 0.25},
    "linear-to-share": {"schedule": "linear", "final_learning_rate_share": 0.25},
    "constant": {"schedule": "constant", "warmup_steps": 0},
}
READ = """
import json, sys, warnings
from pathlib import Path
import torch, transformers.training_args as theirs
from transformers import HfArgumentParser, TrainingArguments, get_scheduler
# This machine need not have the GPU that settings are for.
theirs.is_torch_bf16_gpu_available = theirs.is_torch_tf32_available = lambda: True
theirs.enable_tf32 = lambda on: None
results = {}
for path in map(Path, sys.argv[1:]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(path))
        TrainingArguments(**json.loads(path.read_text()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=arguments.learning_rate)
    schedule = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        arguments.get_warmup_steps(arguments.max_steps),
        arguments.max_steps,
        arguments.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(arguments.max_steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step(); schedule.step()
    results[path.stem] = {
        "arguments": json.loads(arguments.to_json_string()),
        "rates": rates,
        "warnings": [
            str(warning.message) for warning in caught
            if issubclass(warning.category, FutureWarning)
        ],
    }
print(json.dumps(results))
"""

# Runs the code of each export in its order, with stand-ins for the dataset and its
# tokenizer. Without a GPU, Lightning takes no arguments for one: then only their names
# are checked.
RUN = """
import inspect, json, shutil, sys, types
from datetime import timedelta
from pathlib import Path
import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, ProjectConfiguration, set_seed
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
CONFIG = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
texts = []
dataset = [0] * 8
tokenizer = lambda *_, **__: None
DataCollatorForLanguageModeling = lambda tokenizer, mlm, mlm_probability: None
wrapped = types.SimpleNamespace(clip_grad_norm_=lambda max_norm: None)
self = types.SimpleNamespace(trainer=types.SimpleNamespace(model=wrapped))
results = {}
for path in sys.argv[1:]:
    arguments = json.loads(Path(path).read_text())
    remarks = json.loads(Path(path).with_suffix(".remarks.json").read_text())
    names = dict(globals())
    for call in remarks["calls"]:
        if "trainer = " not in call or arguments["accelerator"] == "cpu":
            exec(call, names)
    groups = names["optimizer"].param_groups
    result = {"groups": [len(group["params"]) for group in groups]}
    if "trainer" in names:
        result["strategy"] = type(names["trainer"].strategy).__name__
    if "distributed_type" in arguments:
        result |= load_config_from_file(path).to_dict()
        result["backend"] = names["accelerator"].state.dynamo_plugin.backend.value
        AcceleratorState._reset_state(True)
        shutil.rmtree("runs")
    else:
        assert set(arguments) <= set(inspect.signature(Trainer.__init__).parameters)
    results[path] = result
print(json.dumps(results))
"""
LAUNCHED = {
    "alone": {},
    "compile": {"compile": True, "activation_checkpointing": "full"},
    "fsdp2": (
        VARIANTS["fsdp2"]
        | {"parallel": ParallelSettings(strategy="fsdp2", shard_ranks=2)}
    ),
    "ddp": (
        CUDA | {"parallel": ParallelSettings(gradient_dtype="bf16", bucket_cap_mib=50)}
    ),
}


def export_to(target, profile, *options):
    """Export a profile, which must succeed."""
    command = ["profile", "export", str(profile), "--to", target, *options]
    assert run(command) == 0


def run_python(directory, *arguments):
    """Run Python in a directory; return the JSON value of its last line."""
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return what transformers loads from exports, with their profiles.

    The profiles are all that are shipped, and variants of the example.
    """
    directory = tmp_path_factory.mktemp("exports")
    profiles = {path.stem: path for path in SHIPPED}
    for name, changes in VARIANTS.items():
        train = {"max_steps": 40, "warmup_steps": 5, **changes}
        profiles[name] = directory / f"{name}.toml"
        profiles[name].write_text(profile_to_toml(but(example_profile(), train=train)))
    files = []
    for name, path in profiles.items():
        files.append(str(directory / f"{name}.json"))
        export_to("hf-trainer", path, "--out", files[-1], "--nodes", "2")
    results = run_python(directory, "-c", READ, *files)
    return {
        name: results[name] | {"profile": read_profile(path).profile}
        for name, path in profiles.items()
    }


EXPORTED = [*(path.stem for path in SHIPPED), *VARIANTS]


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_takes_every_value(loaded, name):
    arguments = loaded[name]["arguments"]
    profile = loaded[name]["profile"]
    train = profile.train
    assert arguments["max_steps"] == train.max_steps
    assert arguments["bf16"] == (train.precision == "bf16")
    assert arguments["dataloader_num_workers"] == train.data.num_workers
    assert arguments["torch_compile"] == train.compiled
    samples_per_rank = (
        arguments["per_device_train_batch_size"]
        * arguments["gradient_accumulation_steps"]
    )
    # A step has at least as many samples as sequences.
    assert samples_per_rank * 2 * profile.local_ranks >= train.global_batch_size


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_has_our_learning_rates_after_warm_up(loaded, name):
    train = loaded[name]["profile"].train
    ours = [learning_rate(train, step) for step in range(train.max_steps)]
    first = train.warmup_steps
    assert loaded[name]["rates"][first:] == pytest.approx(
        ours[first:], rel=1e-9, abs=1e-15
    )


def test_transformers_takes_all_of_fsdp(loaded):
    arguments = loaded["fsdp2"]["arguments"]
    assert arguments["fsdp"] is True
    assert arguments["fsdp_config"]["version"] == 2
    assert arguments["fsdp_config"]["activation_checkpointing"] is True
    assert arguments["gradient_checkpointing"] is False


def test_only_checkpointing_has_a_deprecated_name(loaded):
    warnings = loaded["bucketed"]["warnings"]
    assert any("gradient_checkpointing" in warning for warning in warnings)
    warned = [name for name, result in loaded.items() if result["warnings"]]
    assert warned == ["bucketed"]


@pytest.fixture
def packed(workdir):
    """Write a profile of packed sequences."""
    train = {"layout": "packed", "seq_length_tokens": 64, "global_batch_size": 32}
    profile = but(example_profile(), train=train)
    (workdir / "p.toml").write_text(profile_to_toml(profile))


def test_counts_samples_of_packed_sequences(packed, capsys, patterned_dataset):
    data = ("--data", str(patterned_dataset))
    export_to("hf-trainer", "p.toml", *data, "--json")
    out, err = capsys.readouterr()
    assert err == ""
    batch = json.loads(out)["batch"]
    # 24.5 tokens and two special ones, in sequences of 64.
    assert 2 < batch["samples_per_sequence"] < 3
    wanted = 32 * batch["samples_per_sequence"]
    difference = abs(batch["exported_samples_per_step"] - wanted)
    assert difference <= 0.5 * batch["gradient_accumulation_steps"] + 0.5
    assert batch["exported_tokens_per_step"] == pytest.approx(
        batch["tokens_per_step"], rel=0.3
    )


def test_export_prints_settings_with_remarks_on_stderr(packed, capsys):
    export_to("hf-trainer", "p.toml")
    out, err = capsys.readouterr()
    assert json.loads(out)["per_device_train_batch_size"] == 2
    for words in (
        "No equivalent:",
        "cross-document attention",
        "warning: The number of samples per",
        "--data",
    ):
        assert words in err


def test_export_writes_settings_with_remarks(packed, workdir, says, capsys):
    export_to("hf-trainer", "p.toml")
    printed = json.loads(capsys.readouterr().out)
    export = ("profile", "export", "p.toml", "--to", "hf-trainer")
    assert "hf/settings.remarks.json" in says(*export, "--out", "hf/settings.json")
    settings = json.loads((workdir / "hf/settings.json").read_text())
    remarks = json.loads((workdir / "hf/settings.remarks.json").read_text())
    assert remarks["arguments"] == settings == printed
    lost = {
        setting["setting"]
        for setting in remarks["settings"]
        if setting["equivalence"] == "none"
    }
    assert lost >= {"layout", "mlm_head"}


def test_rejects_unknown_target(packed, says):
    export = ("profile", "export", "p.toml", "--to", "axolotl")
    assert "hf-trainer" in says(*export, code=2)


def test_libraries_run_exported_calls(workdir):
    files = []
    for name, changes in LAUNCHED.items():
        train = {"evaluation": EvaluationSettings(interval_steps=9), **changes}
        profile = workdir / f"{name}.toml"
        profile.write_text(profile_to_toml(but(example_profile(), train=train)))
        ranks_by_target = {
            "accelerate": 4 if "device" in changes else 1,
            "lightning": 1 if name == "alone" else 4,
        }
        for target, ranks in ranks_by_target.items():
            file = f"{target}-{name}.json"
            export_to(target, profile, "--out", file, "--ranks", str(ranks))
            files.append(file)
    (workdir / "run.py").write_text(RUN)
    results = run_python(workdir, "run.py", *files)
    assert all(0 not in result["groups"] for result in results.values())
    types = [
        results[f"accelerate-{name}.json"]["distributed_type"] for name in LAUNCHED
    ]
    assert types == ["NO", "NO", "FSDP", "MULTI_GPU"]
    parallelism = results["accelerate-fsdp2.json"]["parallelism_config"]
    assert parallelism["parallelism_config_dp_replicate_size"] == 2
    strategies = [
        results[f"lightning-{name}.json"].get("strategy") for name in LAUNCHED
    ]
    assert strategies == ["SingleDeviceStrategy", "DDPStrategy", None, None]


def test_accelerate_launches_exported_calls(workdir):
    train = {
        "evaluation": EvaluationSettings(interval_steps=9),
        **LAUNCHED["compile"],
    }
    profile = workdir / "compile.toml"
    profile.write_text(profile_to_toml(but(example_profile(), train=train)))
    file = "accelerate-compile.json"
    export_to("accelerate", profile, "--out", file, "--ranks", "1")
    (workdir / "run.py").write_text(RUN)
    launch = ("-m", "accelerate.commands.launch", "--config_file", file)
    results = run_python(workdir, *launch, "run.py", file)
    assert results[file]["backend"] == "INDUCTOR"
