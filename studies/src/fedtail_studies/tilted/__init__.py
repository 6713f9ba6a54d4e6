"""Tilted empirical risk minimisation: the tables and figures of [Li23, chapter 7]."""
