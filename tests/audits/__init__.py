"""Audits of every private release that a shipped recipe can make: `make audits`."""
