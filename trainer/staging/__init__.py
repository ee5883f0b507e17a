"""Staging: a copy of the dataset on node-local disk.

On a shared file system, random reads of samples can be slower than training. All ranks
of a node call ``stage.stage``: one of them copies the dataset, the others wait. Begin
reading there. ``staging_directory`` is the directory of copies on the local disk,
``copying`` copies one dataset into it in several ``threads``, and ``read_speed``
measures what the copy gains. No torch here.
"""
