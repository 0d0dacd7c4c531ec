"""Storage of ``torch.distributed.checkpoint``; see `layerstore.dcp`."""
