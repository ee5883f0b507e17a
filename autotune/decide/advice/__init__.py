"""Advice with evidence: what is known of a training, looked at by a table of rules. Pure."""
