"""Health of a run: loss spikes, failures, signals, time limits and hung ranks.

``controller`` is what the training loop uses; begin there. It checks the numbers of
every step with ``monitor`` (loss and gradient norm, by ``robust_statistics``) and
``plateau``, and lets all ranks agree on stops and saves. ``watchdog`` handles signals
and hung ranks in a thread, ``signals`` lists those that request an exit, and
``time_budget`` says when to stop for a time limit.
``events`` defines what is recorded, with causes and next steps, and ``failures``
classifies the errors of libraries.

Only ``controller`` and ``failures`` need torch. So that the others stay free of it,
this package exports no names; import them from their modules.
"""
