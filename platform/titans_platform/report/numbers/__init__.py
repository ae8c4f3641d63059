"""Pure functions of results: the table, the verdict, what an inspected text shows."""
