"""Load exported files as transformers' TrainingArguments, and print the result as JSON.

Arguments: paths of the files. The result has, by the name of the file without suffix,
these keys:

arguments: all fields of TrainingArguments.
rates: learning rate of every step.
warnings: texts of the deprecation warnings.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import (
    HfArgumentParser,
    TrainingArguments,
    get_scheduler,
    training_args,
)


def accept_settings_of_gpus():
    """Skip the checks for a GPU, which this machine need not have.

    TrainingArguments makes them when it is created, and has no option to skip them.
    """
    training_args.is_torch_bf16_gpu_available = lambda: True
    training_args.is_torch_tf32_available = lambda: True
    training_args.enable_tf32 = lambda _: None


def load(path):
    """Return the arguments in a file, and the warnings that loading it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(str(path))
        # The parser ignores unknown names, the class rejects them.
        TrainingArguments(**json.loads(path.read_text()))
    return arguments, caught


def learning_rates(arguments):
    """Return the learning rate of every step, by transformers' own schedule."""
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
        optimizer.step()
        schedule.step()
    return rates


def result_of(path):
    """Return the result of one file, as the module describes it."""
    arguments, caught = load(path)
    deprecations = [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, FutureWarning)
    ]
    return {
        "arguments": json.loads(arguments.to_json_string()),
        "rates": learning_rates(arguments),
        "warnings": deprecations,
    }


if __name__ == "__main__":
    accept_settings_of_gpus()
    files = [Path(argument) for argument in sys.argv[1:]]
    print(json.dumps({file.stem: result_of(file) for file in files}))
