"""Health of a run: loss spikes, failures, signals, time limits and hung ranks.

The training loop uses ``controller``; begin there. It lets ``monitor`` check the
numbers of every step, and all ranks agree on the ``requests`` to stop or save. The
monitor compares losses and gradient norms with their ``metric_history``, by
``robust_statistics``; it also finds a ``plateau``, and counts rollbacks in
``recovery``.

``watchdog`` handles signals and hung ranks in a thread, ``signals`` lists those that
request an exit, and ``time_budget`` says when to stop for a time limit, such as that
of a SLURM job. ``findings`` defines what the checks find, with causes and next steps.
``failures`` explains the errors of libraries.

Only ``controller`` and ``failures`` need torch. So that the others stay free of it,
this package exports no names; import them from their modules.
"""
