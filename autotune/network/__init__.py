"""Links, the step over a network, and scaling to more nodes (`network`)."""
