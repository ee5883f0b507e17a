"""Run health: detection and handling of loss spikes, failures, signals, time limits and hung ranks."""
