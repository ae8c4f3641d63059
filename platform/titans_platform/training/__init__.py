"""Training one model: a plain PyTorch loop, its checkpoints, and the cell that runs them."""
