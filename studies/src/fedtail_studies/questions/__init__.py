"""Questions asked with fixed settings: theta between FedAvg and AFL, a family of models, flipped labels; and two of ours."""
