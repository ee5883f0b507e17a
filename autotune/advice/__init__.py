"""The bottleneck of a step, and rules that say what to change (`advise`)."""
