"""Device memory: how large a micro-batch fits, predicted and measured.

The memory of a step is predicted from traces of it on the meta device:
``decide.memory_model`` turns the traces of a few sizes into the memory of any size, and
``estimate`` traces until the largest size that fits is known. ``measure`` verifies that
size by trials on both sides, and a few more give the ``throughput`` of smaller ones.

Begin with ``measure.probe_subject`` and ``estimate.estimate_model``, which know no
trainer. Only modules of ``jobs`` import torch, in child processes.
"""
