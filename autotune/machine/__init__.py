"""This machine: its GPUs, host and CPUs, a table of GPU models, and what would spoil a measurement (`doctor`)."""
