"""The fewest DataLoader workers that keep the devices busy (`autotune workers`).

Short windows of real training, each next to one on cached batches, show how many
workers suffice; the result goes into the profile. All of it works for every subject:
the bundled trainer, and code of yours with a loader and a step, or the time of a step
to replay.

Begin with ``decide.worker_count``, the rule that chooses the count and the windows to
measure next. ``measure`` applies it, ``windows`` makes the trial of a window from a
subject, and ``jobs.window`` runs it in the child process. ``stage`` is the whole phase.
If no number of workers suffices, ``joint_search`` also tries prefetching and pinning,
as far as the loader takes them. Both are trials of the Optuna study of
``loader_study``. ``workers_evidence`` makes a table of the profile from
a finished sweep.
"""
