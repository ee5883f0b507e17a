"""Links between ranks, gradient synchronisation and scaling (`network`).

``stage`` measures the links, and a step on one rank and on all of them; ``scaling``
predicts more nodes. The bundled trainer also chooses a strategy, in
``autotune.subjects.mlm.network``.
"""
