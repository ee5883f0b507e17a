"""Pure decisions on trials: no torch, files, clock or environment.

``contamination`` discards outcomes that something disturbed, ``plausibility`` rates
that no GPU can reach, and ``equal_loss`` tells whether two settings learn the same.
"""
