"""Run the code of exports to accelerate and Lightning, and print its results as JSON.

Arguments: paths of the settings, with their remarks beside them. The result has, by
path, these keys:

groups: number of parameters in each group of the optimizer.
strategy: class of the trainer's strategy, if the code makes a Lightning trainer.
backend: compiler of the Accelerator, if the code makes one; the settings of the file
    are beside it, as accelerate reads them.

The code of an export runs with the names of this module: the imports below, and the
stand-ins.
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

# Stand-ins for the names that an export expects of the program that it is pasted into.

CONFIG = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
texts = []
dataset = [0] * 8
# Lightning's module: its trainer has wrapped the model, which clips gradients.
self = types.SimpleNamespace(
    trainer=types.SimpleNamespace(
        model=types.SimpleNamespace(clip_grad_norm_=lambda max_norm: None)
    )
)


def tokenizer(*_, **__):
    """Stand in for a tokenizer, which the code calls and whose result it drops."""


def DataCollatorForLanguageModeling(tokenizer, mlm, mlm_probability):
    """Stand in for the collator, which needs a real tokenizer."""


def run_calls(calls, arguments):
    """Run the code of an export.

    Args:
        calls: Lines of code, in their order.
        arguments: Settings of the export's file, which the code may use.

    Returns:
        All names after the code has run, by name: those of this module, and those that
        the code assigns.
    """
    names = dict(globals(), arguments=arguments)
    # Without a GPU, Lightning rejects arguments for one: only their names are checked.
    can_make_trainer = arguments.get("accelerator") == "cpu"
    for call in calls:
        makes_trainer = "trainer = " in call
        if not makes_trainer or can_make_trainer:
            exec(call, names)
    return names


def accelerate_result(path, accelerator):
    """Return the settings as accelerate reads them, and the Accelerator's compiler."""
    settings = load_config_from_file(str(path)).to_dict()
    return settings | {"backend": accelerator.state.dynamo_plugin.backend.value}


def prepare_next_accelerator():
    """Remove what would disturb the Accelerator of the next export."""
    # All Accelerators of a process share their state, of which the first decides the
    # settings; accelerate has no public function that clears it.
    AcceleratorState._reset_state(reset_partial_state=True)
    # The code saves a checkpoint here; accelerate does not replace one.
    shutil.rmtree("runs")


def lightning_result(names):
    """Return the class of the strategy, if the code has made a trainer."""
    if "trainer" not in names:
        return {}
    return {"strategy": type(names["trainer"].strategy).__name__}


def check_trainer_takes(arguments):
    """Check that Lightning's Trainer has all arguments of a file.

    Needed if no trainer is made, as then nothing else rejects an unknown name.
    """
    assert set(arguments) <= set(inspect.signature(Trainer.__init__).parameters)


def result_of(path):
    """Run the code of one export; return its result, as the module describes it."""
    arguments = json.loads(path.read_text())
    remarks = json.loads(path.with_suffix(".remarks.json").read_text())
    names = run_calls(remarks["calls"], arguments)
    groups = names["optimizer"].param_groups
    result = {"groups": [len(group["params"]) for group in groups]}
    is_accelerate = "distributed_type" in arguments
    if is_accelerate:
        result |= accelerate_result(path, names["accelerator"])
        prepare_next_accelerator()
    else:
        check_trainer_takes(arguments)
        result |= lightning_result(names)
    return result


if __name__ == "__main__":
    print(json.dumps({path: result_of(Path(path)) for path in sys.argv[1:]}))
