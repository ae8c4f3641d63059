"""One run: what it is, its folder, and the one way it is executed."""
