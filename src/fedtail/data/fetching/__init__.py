"""Public data sets, downloaded where there is a network and prepared as populations."""

from fedtail.data.fetching.catalogue import CATALOGUE, PublicSet, Source, named
from fedtail.data.fetching.downloading import download
from fedtail.data.fetching.fetch import Wishes, fetch

__all__ = ["CATALOGUE", "PublicSet", "Source", "Wishes", "download", "fetch", "named"]
