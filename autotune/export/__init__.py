"""Export of a profile to another trainer (`profile export`).

The tables of each target are in ``subjects.mlm.export``.
"""
