"""The neural long-term memory: gradient descent with momentum and forgetting, as an operator.

`forms.reference` is the token-by-token recurrence for any rule of `rules`, and `forms.generic` the chunked
form for any rule; `forms.chunked`, `forms.native` and `forms.triton` are the fast forms of the paper's rule.
`decode` continues a sequence from any position.
"""
