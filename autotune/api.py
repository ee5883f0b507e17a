"""The functions that the commands call, for other Python programs.

They return the values that ``--json`` prints, and print nothing but progress. What cannot be used raises
``AutotuneError``, or ``TrainerError`` for files of the trainer; both have a ``message``, a ``next_step`` and the
``exit_code`` of the command. None of them imports torch into your process: what needs it runs in child processes.
"""

from autotune.advice.decide.rules import advise
from autotune.advice.sources import situation_of
from autotune.compare.decide import gate
from autotune.compare.sides import compare_paths
from autotune.errors import AutotuneError
from autotune.machine.host import SystemHost
from autotune.memory.measure import ProbeRequest
from autotune.memory.prediction import PredictionRequest, find_target, predict, settings_of_step
from autotune.memory.stage import asked_config
from autotune.plan.inputs import PlanRequest, plan
from autotune.plan.values import Goal
from autotune.profiles.store import read_profile
from autotune.tune.pipeline import TuneRequest, Tuning
from trainer.config.presets import model_settings
from trainer.errors import TrainerError
from trainer.record.progress import progress

__all__ = [
    "AutotuneError", "Goal", "PlanRequest", "PredictionRequest", "ProbeRequest", "SystemHost", "TrainerError",
    "TuneRequest", "Tuning", "advise", "asked_config", "compare_paths", "find_target", "gate", "model_settings", "plan",
    "predict", "progress", "read_profile", "settings_of_step", "situation_of",
]  # fmt: skip
