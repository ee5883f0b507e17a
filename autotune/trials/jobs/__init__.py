"""Processes that run trials: the only modules of this package that import torch.

``server`` forks the ranks of each trial and calls the job's ``run`` in them;
``multirank_worker`` is a rank of several nodes, which torchrun starts. Jobs use
``budget`` to enforce a memory budget and ``footprint`` to measure host memory.
"""
