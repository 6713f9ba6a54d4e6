"""Chapter 5 of [Li23]: Ditto, robust and fair federated learning by personal models."""
