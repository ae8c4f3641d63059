"""The neural long-term memory: gradient descent with momentum and forgetting, as an operator.

`reference` is the recurrence token by token, for any rule of `rules`; `autograd` its chunked form for any
rule; `chunked` and `triton` the fast forms of the paper's rule; `decode` continues a sequence from anywhere.
"""
