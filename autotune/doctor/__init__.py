"""This machine, and what would spoil a measurement on it (``doctor``).

``command.examine`` collects the facts that ``machine`` reads, and ``sections`` shows
them.
"""
