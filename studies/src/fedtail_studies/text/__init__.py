"""Clients who write: the roles of Shakespeare, the accounts of Sent140."""
