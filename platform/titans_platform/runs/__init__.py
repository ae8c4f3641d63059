"""A single run: its spec, its folder, its execution and its result."""
