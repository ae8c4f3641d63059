"""How fast the neural memory is, in units that do not depend on its size, beside others in the same process.

Needs torch, Triton, numpy and click only: machines with a GPU often have no more. What is timed is checked
first, and an op whose check is red is not timed.
"""
