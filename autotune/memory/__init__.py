"""Device memory: how large a micro-batch fits, predicted and measured.

``autotune estimate`` predicts it without a GPU: the ``trace`` job runs the trainer's
step on the meta device, ``decide.memory_model`` turns the traces of a few micro-batch
sizes into the memory of any size, and ``predictor`` finds the largest that fits.
``autotune probe`` measures it: trials verify the largest micro-batch on both sides, and
a few more give the ``throughput`` of smaller ones. A probe needs a dataset and the
machine that will train. ``plan_memory`` has the memory of one GPU for ``autotune
plan``, and ``plan_shares`` divides it among several.

Begin with ``stage.probe_models`` and ``prediction.predict``, the public entries;
``estimate.estimate_model`` traces one model. Only modules of ``jobs`` import torch, in
child processes.
"""
