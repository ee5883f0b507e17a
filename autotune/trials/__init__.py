"""Trials: request, child process, outcome and log; paired rounds; monitoring of the GPUs meanwhile."""
