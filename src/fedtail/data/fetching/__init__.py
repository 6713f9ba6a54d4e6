"""Public data sets, downloaded where there is a network and prepared as populations."""

from fedtail.data.fetching.catalogue import CATALOGUE, PublicFile, PublicSet, find_public_set
from fedtail.data.fetching.downloading import download
from fedtail.data.fetching.fetch import Wishes, fetch
from fedtail.deprecated import old_names

__all__ = ["CATALOGUE", "PublicFile", "PublicSet", "Wishes", "download", "fetch", "find_public_set"]

__getattr__ = old_names(__name__)
