"""The profile: the result of tuning, a TOML file that you train with.

It holds the settings of the trainer with the measurements behind them (`autotune
profile`). This package reads and writes profiles, explains every setting, compares a
profile with this machine and with its trial log, and approves it. It needs no GPU, and
imports no torch.

Begin with ``values``, the tables of a profile, and ``store``, with ``read_profile`` and
``write_profile``; ``toml_file`` has the format of the file, ``profile_paths`` the paths
to write to. ``local_probe`` and ``recorded_trials`` serve the commands that measure
with a profile. ``verification`` compares a profile with this machine (``checks``: the
results), ``approval`` stores reviews (``approval_record``: their values). ``sections``,
``fingerprint_table``, ``review_text`` and ``reproduction`` render. ``decide`` holds the
pure decisions. Exports to other trainers are in ``autotune.subjects.mlm.export``.
"""
