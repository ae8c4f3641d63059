"""The paper's baselines of language and DNA, one block a file; docs/method.md has what each contains."""
