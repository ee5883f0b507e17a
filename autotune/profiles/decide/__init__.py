"""Pure decisions on profiles: no torch, files, clock or environment.

``micro_batch`` chooses the micro-batch size, ``batch_split`` splits the global batch,
``default_settings`` follow from model and device. ``rates`` has the throughput to
expect, ``drift`` compares a run with it. ``explain`` gives the reason of every setting,
``follow_up`` the commands to run next. ``trial_log_check`` and ``fingerprint_check``
compare a profile with its trials and with this machine. ``export`` translates it.
"""
