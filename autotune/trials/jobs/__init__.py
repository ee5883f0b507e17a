"""Processes that run trials: the only modules of this package that import torch.

Begin with ``server``, the fork server, which loads torch (``preload``) and answers the
requests of a machine. ``supervision`` forks, watches and ends the ranks of a trial,
``rank`` sets up a forked process, and ``run_job`` calls the job's ``run`` and writes
its result. ``kernel_kills`` counts processes that the kernel killed for memory.

``multirank_worker`` is a rank on one of several nodes, which torchrun starts. Jobs use
``budget`` to enforce a memory budget, with ``cpu_allocators``, and ``footprint`` to
measure memory.
"""
