"""What several forms are made of: chunks, coefficients of the gates, a chunk's passes and their backward."""
