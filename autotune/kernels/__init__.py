"""Kernels of a training step: the time of each, and how far it is from its bound.

A kernel's bound is the time that its FLOPs and bytes need at the rates that the device
reached in the same process. The ``kernels`` job of ``memory`` profiles them.
"""
