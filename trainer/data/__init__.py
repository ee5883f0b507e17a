"""The dataset, and micro-batches of it.

From the files on disk to tensors for a model, in this order: ``dataset`` reads the
pre-tokenised samples of a dataset, which a ``trainer.formats.manifest`` describes.
``batch_plan`` assigns samples to sequences and ranks as a pure function of the seed, by
``permutation`` and ``packing``; its results are ``segments``. ``sampler`` plans the
micro-batches of one rank, from a ``position`` on and from every ``lane`` in turn, and
``masking`` chooses the tokens to predict, for which the model has ``head_slots``.
``micro_batch_source`` makes a ``micro_batch.MicroBatch`` from its plan: its tensors are
``joined_tensors``, among them the ``segment_indices`` that attention and head need.
``loader`` does so for a whole run, in this process or in DataLoader workers.
``global_batch`` converts the size of the global batch to sequences, by the means in
``sequence_statistics``.

``loader`` and the modules of micro-batches need torch, so this package exports no
names; import them from their modules. To read a dataset, begin with
``dataset.TokenDataset``; to train, with ``batch_plan.make_plan`` and
``loader.MicroBatchLoader``.
"""
