"""Training on many ranks: process group, devices, parallel strategies and the step.

``ranks`` joins the process group and has the collectives that agree on numbers; begin
there. ``device`` picks the GPU of a rank, ``cpu_binding`` keeps the rank on the CPUs
near it, and ``device_events`` marks points in time on it without waiting.
``rank_errors`` tells whether another rank is lost.

``parallel`` wraps a module for DDP, ZeRO-1 or FSDP2, and ``gradient_traffic`` averages
its gradients under DDP. ``optimizer`` makes AdamW with its schedule, and ``step`` takes
one optimizer step, in training and in trials alike.

All but ``cpu_binding`` need torch, so this package exports no names; import
``ranks.join_ranks``, ``parallel.parallelise`` and ``step.TrainStep`` from their
modules.
"""
