"""Time, cost and memory of a run before it starts (`plan`)."""
