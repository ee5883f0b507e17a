"""This machine (`doctor`).

It describes GPUs, host and CPUs, has a table of GPU models, and checks the machine
before measurements.
"""
