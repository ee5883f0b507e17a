"""Memory of the bundled trainer's step, predicted and measured.

``autotune estimate`` predicts it without a GPU: the ``trace`` job runs the trainer's
step on the meta device, and ``predictor`` finds the largest micro-batch that fits, from
``autotune.memory.estimate``. ``autotune probe`` measures it: ``probe`` completes its
request for a dataset and the machine that will train. ``plan_memory`` has the memory of
one GPU for ``autotune plan``, and ``plan_shares`` divides it among several.

Begin with ``probe.MlmProbeRequest`` and ``prediction.predict``, the public entries.
"""
