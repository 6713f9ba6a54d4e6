"""Studies of chapter 6 of [Li23]: private adaptive optimisers with side information (AdaDPS) and without (DP2)."""
