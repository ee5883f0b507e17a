"""Child processes: the only modules of this package that import torch.

Two jobs begin here. ``step.run`` takes real optimizer steps under a memory budget.
``model_trace.run`` records the allocations of a model's steps on the meta device, where
tensors have no content; for a whole training step, the job of a subject does so with
``tracer.tracing``. The other modules give that device the behaviour of a real one:
``device_rules`` for functions, ``kernels`` for allocations inside of operators,
``compiled`` for compiled layers, and ``gradient_buckets``, ``shards`` and ``zero1`` for
several ranks.
"""
