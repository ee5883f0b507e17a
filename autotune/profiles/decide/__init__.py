"""Pure decisions on profiles: no torch, files, clock or environment.

``micro_batch`` chooses the micro-batch size (``knee``: its uncertainty),
``batch_split`` splits the global batch, ``default_settings`` follow from model and
device. ``rates`` has the throughput to expect of a profile, ``run_rates`` that of a
run, and ``drift`` compares them. ``explain`` gives the reason of every setting,
``follow_up`` the commands to run next. ``trial_log_check`` and ``fingerprint_check``
compare a profile with its trials and with this machine.
"""
