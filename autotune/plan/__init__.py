"""Time, cost and memory of a run before it is paid for (`plan`)."""
