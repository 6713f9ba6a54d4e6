"""A stock Flower app."""
