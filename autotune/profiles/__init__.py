"""The profile: the result of tuning, a TOML file that you train with.

It holds the settings of the trainer with the measurements behind them (`autotune
profile`). This package reads and writes profiles, explains every setting, compares a
profile with this machine and with its trial log, approves it, and exports it to other
trainers. It needs no GPU, and imports no torch.

Begin with ``values``, the tables of a profile, and ``store``, with ``read_profile`` and
``write_profile``. ``approval`` stores reviews and verifies a profile on this machine;
``sections`` renders it; ``decide`` holds the pure decisions: batch split, expected
rates and drift, explanations, checks, and exports.
"""
