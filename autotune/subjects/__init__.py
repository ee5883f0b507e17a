"""Subjects of tuning: training steps that are built at a size and fed by a loader.

``subject.Subject`` is the interface; begin there. Its kinds are ``own`` (functions of
yours), ``transformers``, ``lightning`` and ``accelerate`` (those libraries' trainers)
and ``mlm`` (the bundled trainer). ``bench`` opens a machine on which trials of a
subject run; ``jobs`` import your code in a trial's process.
"""
