"""This machine: its GPUs, host and CPUs, a table of GPU models, and checks before measurements (`doctor`)."""
