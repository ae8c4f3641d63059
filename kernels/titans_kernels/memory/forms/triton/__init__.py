"""The memory as Triton kernels, forward and backward. See kernels/README.md for which shape takes which."""
