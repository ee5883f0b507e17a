"""Trials: request, child process, outcome and log; paired rounds.

Monitoring of the GPUs meanwhile.
"""
