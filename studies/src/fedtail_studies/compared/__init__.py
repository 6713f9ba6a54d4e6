"""The comparison of methods in [PLMH23, section 7]: one protocol, its rows, claims and figures, for any clients and model."""
