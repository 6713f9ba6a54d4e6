"""Chapter 3 of [Li23], FedProx: stragglers, heterogeneous data, an adaptive penalty, FedDane and two ways to sample devices."""
