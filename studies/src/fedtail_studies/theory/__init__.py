"""What the papers prove: bias, rates of convergence, three Gaussians."""
