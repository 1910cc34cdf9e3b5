"""Models whose parameters are sharded over the processes of a run, with PyTorch's FSDP2."""
