"""Links between ranks, gradient synchronisation and scaling (`network`).

``measure`` finds the fastest gradient synchronisation, and ``scaling`` predicts more
nodes.
"""
