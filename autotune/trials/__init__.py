"""Trials: measurements in child processes, kept in a log so that none is repeated.

A ``values.Trial`` describes a measurement and has a key. A machine
(``fork_server.ForkServerMachine``, ``multirank.MultirankMachine``) runs it in processes
that import torch, and returns its outcome (``outcomes``). ``contamination_guard``
discards outcomes that another program or a fault disturbed. ``runner.TrialRunner``
keeps each outcome in the trial log of the profile, and takes it from there the next
time. ``rounds`` measures several configurations that are compared. Modules in
``decide`` are pure, those in ``jobs`` run in the child processes.

Begin reading at ``values``, then ``runner`` and ``opened_bench.open_bench``, which
phases of tuning start from. Nothing is exported here: ``opened_bench`` imports half of
the project.
"""
