"""Training on many ranks: parallel strategies and the step.

``parallel`` wraps a module for DDP, ZeRO-1 or FSDP2, and ``gradient_traffic`` averages
its gradients under DDP. ``optimizer`` makes AdamW with its schedule, and ``step`` takes
one optimizer step, in training and in trials alike; begin there. ``rank_errors`` tells
whether another rank is lost. The ranks themselves are in ``trainer.runtime``.

All need torch, so this package exports no names; import ``parallel.parallelise`` and
``step.TrainStep`` from their modules.
"""
