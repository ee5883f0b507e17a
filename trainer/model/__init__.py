"""The encoder: its modules, attention, the sparse last layer, the masked-LM loss and FLOPs."""
