"""Models of clients' own, which never leave them."""

from fedtail.personal.base import NoPersonalModels, PersonalModels
from fedtail.personal.ditto import Ditto, ValidatedDitto

__all__ = ["Ditto", "NoPersonalModels", "PersonalModels", "ValidatedDitto"]
