"""Staging: a copy of the dataset on node-local disk.

On a shared file system, random reads of samples can be slower than training. All ranks
of a node call ``stage.stage``: one of them copies the dataset, the others wait. Begin
reading there; ``copying`` does the work for one dataset. No torch here.
"""
