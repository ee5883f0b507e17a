"""Comparison with untuned settings, and the cost of tuning (`baseline`).

``stage`` compares the tuned settings of a profile with untuned ones, or with those of
other profiles, in windows of training that ``measure`` runs. ``side`` has what is
compared: contenders, each a subject with its settings on this machine.
``decide.pay_back`` tells after how much training a tuning has paid for itself.
"""
