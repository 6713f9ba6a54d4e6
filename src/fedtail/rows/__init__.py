"""Rows of clients on disk: written once, found by key, read when they are needed."""

from fedtail.rows.file import RowFile, RowsError
from fedtail.rows.folder import RowFolder, RowPlaces
from fedtail.rows.store import Mark, Recalled, RowReferences, Rows, RowStore

__all__ = ["Mark", "Recalled", "RowFile", "RowFolder", "RowPlaces", "RowReferences", "RowStore", "Rows", "RowsError"]
