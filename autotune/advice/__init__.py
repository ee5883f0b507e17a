"""The bottleneck of a step, and rules that recommend changes (`advise`)."""
