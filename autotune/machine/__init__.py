"""This machine: its GPUs, host and CPUs, and a table of GPU models.

It describes GPUs, host and CPUs, has a table of GPU models, and checks the machine
before measurements.
"""
