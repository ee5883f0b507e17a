"""Pure decisions on trials: no torch, files, clock or environment.

``contamination`` discards outcomes that something disturbed, and ``plausibility`` rates
that no GPU can reach. ``gpu_activity`` adds the activity of GPUs to figures, and
``equal_loss`` tells whether two settings learn the same.
"""
