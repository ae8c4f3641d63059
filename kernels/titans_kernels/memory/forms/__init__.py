"""The forms of the operator: each computes a whole call, and all give the numbers of `reference`."""
