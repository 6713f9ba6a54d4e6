"""Models of clients' own, which never leave them."""

from fedtail.personal.base import NoPersonalModels, PersonalModels
from fedtail.personal.ditto import Ditto, FineTuning, ValidatedDitto
from fedtail.personal.mixtures import APFL, Mapper

__all__ = ["APFL", "Ditto", "FineTuning", "Mapper", "NoPersonalModels", "PersonalModels", "ValidatedDitto"]
