"""Private quantiles and private training."""
