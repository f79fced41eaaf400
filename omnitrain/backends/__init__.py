"""Backends: plain PyTorch, DDP, FSDP, tensor parallelism and DeepSpeed ZeRO."""
