"""A plain Flower app."""
