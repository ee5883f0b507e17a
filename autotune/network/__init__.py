"""Links between ranks, gradient synchronisation, and scaling to more nodes (`network`)."""
