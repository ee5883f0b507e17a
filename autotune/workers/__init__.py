"""The fewest DataLoader workers that keep the devices busy (`autotune workers`).

Short windows of real training, each next to one on cached batches, show how many
workers suffice; the result goes into the profile. It needs a profile that was probed on
the same machine, or the time of a step to replay.

Begin with ``decide.worker_count``, the rule that chooses the count and the windows to
measure next. ``count_sweep`` applies it, ``measure`` to the trainer's own DataLoader,
and ``stage.count_workers`` is the whole phase. ``jobs.training`` runs a window in the
child process. If no number of workers suffices, ``joint_search`` also tries prefetching
and pinning. ``workers_evidence`` makes a table of the profile from a finished sweep.
"""
