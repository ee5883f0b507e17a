"""Loss spikes, failures, signals, time limits and hung ranks: what is noticed and what is done."""
