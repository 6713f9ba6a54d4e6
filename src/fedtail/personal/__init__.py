"""Models of clients' own, which never leave them."""

from fedtail.personal.base import NoPersonalModels, PersonalModels
from fedtail.personal.ditto import Ditto, FineTuning, ValidatedDitto
from fedtail.personal.kept_by_local import KeptByLocal
from fedtail.personal.mixtures import APFL, Mapper

__all__ = ["APFL", "Ditto", "FineTuning", "KeptByLocal", "Mapper", "NoPersonalModels", "PersonalModels", "ValidatedDitto"]
