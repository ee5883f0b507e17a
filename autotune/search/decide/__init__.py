"""Decisions of the joint search, all pure.

``discrete_space`` encodes configurations. ``effects_model`` predicts all of them from
windows of some, and ``improvement`` says what another window may gain.
``configuration_space`` lists the configurations of a subject. ``search_state`` keeps
what was measured, and which configurations remain.
"""
