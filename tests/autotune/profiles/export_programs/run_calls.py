"""Run the code of exports to accelerate and Lightning, and print what it made as JSON.

Arguments: paths of the settings, with their remarks beside them. The code of an export
runs in its order, with the names of this module: the imports below, and stand-ins for
the dataset, the tokenizer and the module around the model.
"""

# ruff: noqa: F401 - the code of exports uses these imports.

import inspect
import json
import shutil
import sys
import types
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
wrapped = types.SimpleNamespace(clip_grad_norm_=lambda max_norm: None)
self = types.SimpleNamespace(trainer=types.SimpleNamespace(model=wrapped))


def tokenizer(*_, **__):
    """Stand in for a tokenizer, which the code calls and whose result it drops."""


def DataCollatorForLanguageModeling(tokenizer, mlm, mlm_probability):
    """Stand in for the collator, which needs a real tokenizer."""


def run_calls(calls, arguments):
    """Run the code of an export; return the names that it leaves."""
    names = dict(globals(), arguments=arguments)
    # Without a GPU, Lightning rejects arguments for one: only their names are checked.
    can_make_trainer = arguments.get("accelerator") == "cpu"
    for call in calls:
        if "trainer = " not in call or can_make_trainer:
            exec(call, names)
    return names


def result_of(path):
    """Return facts on the objects that the code of an export makes."""
    arguments = json.loads(path.read_text())
    remarks = json.loads(path.with_suffix(".remarks.json").read_text())
    names = run_calls(remarks["calls"], arguments)
    groups = names["optimizer"].param_groups
    result = {"groups": [len(group["params"]) for group in groups]}
    if "trainer" in names:
        result["strategy"] = type(names["trainer"].strategy).__name__
    if "distributed_type" in arguments:
        result |= load_config_from_file(str(path)).to_dict()
        result["backend"] = names["accelerator"].state.dynamo_plugin.backend.value
        # The next export makes an Accelerator and a run directory again.
        AcceleratorState._reset_state(True)
        shutil.rmtree("runs")
    else:
        assert set(arguments) <= set(inspect.signature(Trainer.__init__).parameters)
    return result


if __name__ == "__main__":
    print(json.dumps({path: result_of(Path(path)) for path in sys.argv[1:]}))
