"""Building blocks of several forms: chunk layout, gate coefficients, passes over a chunk, their backward."""
