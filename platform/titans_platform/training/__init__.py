"""Training of one model: a plain PyTorch loop, parallelism, and checkpoints."""
