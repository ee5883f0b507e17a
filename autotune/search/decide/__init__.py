"""Decisions of the joint search, all pure.

``configuration_space`` lists the configurations of a subject. ``search_state`` keeps
what was measured, and which configurations remain.
"""
