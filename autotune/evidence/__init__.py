"""Every table that a profile stores and ``--json`` prints, each declared once.

Evidence is built where it is measured, and everything above reads it from here: the
console, the report, advice and plans. A ``profile`` holds settings, constraints, the
fingerprint of a machine, and the evidence of each phase: ``probe``, ``explore``,
``workers``, ``network``, ``confirm`` (with ``kernels``) and ``baseline``, which share
``gpu_use``. ``plan`` has figures with their basis, and ``advice`` has
recommendations.
"""
