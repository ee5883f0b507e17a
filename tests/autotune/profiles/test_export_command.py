"""Exports are loaded by the real libraries, in processes of their own: this one never
imports them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.profiles.store import read_profile
from autotune.profiles.values import profile_to_toml
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
found = {}
for path in map(Path, sys.argv[1:]):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(path))
        TrainingArguments(**json.loads(path.read_text()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments.learning_rate)
    schedule = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(arguments.max_steps), arguments.max_steps,
        arguments.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(arguments.max_steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step(); schedule.step()
    found[path.stem] = {
        "arguments": json.loads(arguments.to_json_string()), "rates": rates,
        "warnings": [str(one.message) for one in told if issubclass(one.category, FutureWarning)],
    }
print(json.dumps(found))
"""

# Runs the code of each export in its order, with stand-ins for the dataset and its
# tokenizer. Without a GPU, Lightning takes no arguments for one: then only their names
# are checked.
RUN = """
import inspect, json, shutil, sys, types
from datetime import timedelta
from pathlib import Path
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
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
CONFIG = dict(model_type="bert", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
tokenizer, texts, dataset = (lambda *_, **__: None), [], [0] * 8
DataCollatorForLanguageModeling = lambda tokenizer, mlm, mlm_probability: None
wrapped = types.SimpleNamespace(clip_grad_norm_=lambda max_norm: None)
self = types.SimpleNamespace(trainer=types.SimpleNamespace(model=wrapped))
found = {}
for path in sys.argv[1:]:
    arguments = json.loads(Path(path).read_text())
    names = dict(globals())
    for call in json.loads(Path(path).with_suffix(".remarks.json").read_text())["calls"]:
        if "trainer = " not in call or arguments["accelerator"] == "cpu":
            exec(call, names)
    said = {"groups": [len(group["params"]) for group in names["optimizer"].param_groups]}
    if "trainer" in names:
        said |= {"strategy": type(names["trainer"].strategy).__name__}
    if "distributed_type" in arguments:
        said |= load_config_from_file(path).to_dict()
        said |= {"backend": names["accelerator"].state.dynamo_plugin.backend.value}
        AcceleratorState._reset_state(True)
        shutil.rmtree("runs")
    else:
        assert set(arguments) <= set(inspect.signature(Trainer.__init__).parameters)
    found[path] = said
print(json.dumps(found))
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


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """What transformers makes of exports of every profile that is shipped, and of
    variants; each with its profile."""
    place = tmp_path_factory.mktemp("exports")
    profiles = {path.stem: path for path in SHIPPED}
    for name, changes in VARIANTS.items():
        profiles[name] = place / f"{name}.toml"
        profile = but(
            example_profile(), train={"max_steps": 40, "warmup_steps": 5, **changes}
        )
        profiles[name].write_text(profile_to_toml(profile))
    files = [str(place / f"{name}.json") for name in profiles]
    for path, file in zip(profiles.values(), files, strict=True):
        assert (
            run(
                [
                    "profile",
                    "export",
                    str(path),
                    "--to",
                    "hf-trainer",
                    "--out",
                    file,
                    "--nodes",
                    "2",
                ]
            )
            == 0
        )
    command = [sys.executable, "-c", READ, *files]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=place, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {
        name: found[name] | {"profile": read_profile(path).profile}
        for name, path in profiles.items()
    }


@pytest.mark.parametrize("name", [*(path.stem for path in SHIPPED), *VARIANTS])
def test_transformers_takes_every_value_and_learns_at_the_same_rates_after_the_warm_up(
    read, name
):
    found, profile = read[name]["arguments"], read[name]["profile"]
    train = profile.train
    assert (found["max_steps"], found["bf16"]) == (
        train.max_steps,
        train.precision == "bf16",
    )
    assert (found["dataloader_num_workers"], found["torch_compile"]) == (
        train.data.num_workers,
        train.compiled,
    )
    batch = found["per_device_train_batch_size"] * found["gradient_accumulation_steps"]
    # A step has at least as many samples as rows.
    assert batch * 2 * profile.local_ranks >= train.global_batch_size
    first = train.warmup_steps
    ours = [learning_rate(train, step) for step in range(train.max_steps)]
    assert read[name]["rates"][first:] == pytest.approx(
        ours[first:], rel=1e-9, abs=1e-15
    )


def test_fsdp_arrives_whole_and_only_checkpointing_uses_a_name_that_will_go(read):
    found = read["fsdp2"]["arguments"]
    assert found["fsdp"] is True
    assert found["fsdp_config"]["version"] == 2
    assert found["fsdp_config"]["activation_checkpointing"] is True
    assert found["gradient_checkpointing"] is False
    assert any(
        "gradient_checkpointing" in text for text in read["bucketed"]["warnings"]
    )
    assert [name for name, found in read.items() if found["warnings"]] == ["bucketed"]


@pytest.fixture
def packed(workdir):
    """The profile, of packed rows."""
    profile = but(
        example_profile(),
        train={"layout": "packed", "seq_length_tokens": 64, "global_batch_size": 32},
    )
    (workdir / "p.toml").write_text(profile_to_toml(profile))


def test_samples_of_packed_rows_are_counted_in_the_dataset(
    packed, capsys, patterned_dataset
):
    assert (
        run(
            [
                "profile",
                "export",
                "p.toml",
                "--to",
                "hf-trainer",
                "--data",
                str(patterned_dataset),
                "--json",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    batch = json.loads(out)["batch"]
    # 24.5 tokens and two special ones, in rows of 64.
    assert 2 < batch["samples_per_sequence"] < 3
    meant = 32 * batch["samples_per_sequence"]
    assert (
        abs(batch["exported_samples_per_step"] - meant)
        <= 0.5 * batch["gradient_accumulation_steps"] + 0.5
    )
    assert batch["exported_tokens_per_step"] == pytest.approx(
        batch["tokens_per_step"], rel=0.3
    )


def test_settings_are_printed_or_written_and_all_else_is_said_beside_them(
    packed, workdir, says, capsys
):
    assert run(["profile", "export", "p.toml", "--to", "hf-trainer"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["per_device_train_batch_size"] == 2
    for words in (
        "No equivalent:",
        "cross-document attention",
        "warning: The number of samples per",
        "--data",
    ):
        assert words in err
    export = ("profile", "export", "p.toml", "--to", "hf-trainer")
    assert "hf/settings.remarks.json" in says(*export, "--out", "hf/settings.json")
    remarks = json.loads((workdir / "hf/settings.remarks.json").read_text())
    assert (
        remarks["arguments"]
        == json.loads((workdir / "hf/settings.json").read_text())
        == json.loads(out)
    )
    assert {
        one["setting"] for one in remarks["settings"] if one["equivalence"] == "none"
    } >= {"layout", "mlm_head"}
    assert "hf-trainer" in says(
        "profile", "export", "p.toml", "--to", "axolotl", code=2
    )


def test_accelerate_and_lightning_take_the_file_and_the_calls_and_accelerate_launches_them(
    workdir,
):
    files = []
    for name, changes in LAUNCHED.items():
        changed = {"evaluation": EvaluationSettings(interval_steps=9), **changes}
        (workdir / f"{name}.toml").write_text(
            profile_to_toml(but(example_profile(), train=changed))
        )
        for to, ranks in (
            ("accelerate", 1 + 3 * ("device" in changes)),
            ("lightning", 1 if name == "alone" else 4),
        ):
            files.append(f"{to}-{name}.json")
            export = [
                "profile",
                "export",
                f"{name}.toml",
                "--to",
                to,
                "--out",
                files[-1],
                "--ranks",
                str(ranks),
            ]
            assert run(export) == 0
    (workdir / "run.py").write_text(RUN)
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate-compile.json",
    ]
    found, launched = (
        json.loads(
            subprocess.run(
                [sys.executable, *options],
                stdout=subprocess.PIPE,
                text=True,
                timeout=300,
                cwd=workdir,
                check=True,
            ).stdout.splitlines()[-1]
        )
        for options in (
            ["run.py", *files],
            [*launch, "run.py", "accelerate-compile.json"],
        )
    )
    assert launched["accelerate-compile.json"]["backend"] == "INDUCTOR"
    assert all(0 not in one["groups"] for one in found.values())
    kinds = [found[f"accelerate-{name}.json"]["distributed_type"] for name in LAUNCHED]
    assert kinds == ["NO", "NO", "FSDP", "MULTI_GPU"]
    assert (
        found["accelerate-fsdp2.json"]["parallelism_config"][
            "parallelism_config_dp_replicate_size"
        ]
        == 2
    )
    strategies = [found[f"lightning-{name}.json"].get("strategy") for name in LAUNCHED]
    assert strategies == ["SingleDeviceStrategy", "DDPStrategy", None, None]
