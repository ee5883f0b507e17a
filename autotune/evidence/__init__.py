"""Every table that a profile stores and ``--json`` prints, each declared once.

Each capability builds its evidence after measuring, and everything else reads that: the
console, the report, advice and plans. A ``profile`` holds settings, constraints, the
fingerprint of a machine, and the evidence of each phase: ``probe``, ``explore``,
``workers``, ``network``, ``confirm`` (with ``kernels``) and ``baseline``, which share
``gpu_use``. ``plan`` has figures with their basis, and ``advice`` has
recommendations.
"""
