"""Ports to the machine: jobs in child processes, GPUs, the host, the clock."""
