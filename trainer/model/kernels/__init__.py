"""Kernels of this project, written in Triton, as operators of torch.

The modules that end in ``_triton`` import Triton; nothing else does, so that operators
can be traced where Triton is not installed.
"""
