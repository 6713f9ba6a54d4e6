"""Fair federated objectives: chapter 4 of [Li23]."""
