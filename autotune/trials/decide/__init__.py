"""Pure decisions on trials: no torch, files, clock or environment.

``contamination`` discards outcomes that something disturbed. ``plausibility`` rejects
rates that no GPU can reach: those of trials, and with ``profile_rates`` and
``run_rates`` those of profiles and of training runs. ``gpu_activity`` adds the activity
of GPUs to figures, ``equal_loss`` decides if two settings learn the same, and
``own_records`` selects a profile's own trials.
"""
