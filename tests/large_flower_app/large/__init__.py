"""Messages of 100 MB."""
