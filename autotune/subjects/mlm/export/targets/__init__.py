"""Trainers to export to: a module for each, whose ``TARGET`` is its table.

To add a trainer, add its module and its name here.
"""

from typing import Literal

TargetName = Literal["hf-trainer", "accelerate", "lightning"]
"""Trainer to export to, named as its module: transformers' Trainer, a loop with
accelerate, or Lightning's Trainer."""
