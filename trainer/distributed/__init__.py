"""Training on many ranks: process group, devices, parallel strategies and the step.

``ranks`` joins the process group and has the collectives that agree on numbers; begin
there. ``device_events`` marks points in time on a GPU without waiting for it.
``parallel`` wraps a module for DDP, ZeRO-1 or FSDP2, ``optimizer`` makes AdamW with its
schedule, and ``step`` takes one optimizer step, in training and in trials alike.
``cpu_binding`` keeps a rank on the CPUs near its GPU.

All but ``cpu_binding`` need torch, so this package exports no names; import
``ranks.join_ranks``, ``parallel.parallelise`` and ``step.TrainStep`` from their
modules.
"""
