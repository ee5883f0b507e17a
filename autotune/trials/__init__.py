"""A trial: its request, child process, outcome and log; paired rounds; GPUs watched meanwhile."""
