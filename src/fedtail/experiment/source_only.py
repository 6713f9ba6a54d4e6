"""Code of an experiment's own is run from its source: bytecode that lies beside it may have been made from another text."""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)      # of the files that are imported from such a folder
_FOLDERS: set[Path] = set()


class SourceOnly(SourceFileLoader):
    """Compiles a module from its source at every import, and neither reads nor writes bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the module `fullname`, compiled from the file just now."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def importable_files(folder: Path) -> list[Path]:
    """The files in `folder` and below it, also behind links, that an import can run; those of installed packages are left out."""
    found, seen = [], set()
    for place, inner, names in os.walk(folder, followlinks=True):
        here = Path(place)
        if here.resolve() in seen or _is_installed(here):
            inner.clear()
            continue
        seen.add(here.resolve())
        found += [here / name for name in names if name.endswith(SUFFIXES)]
    return sorted(found)


def import_source_only(folder: Path) -> None:
    """From now on, modules in `folder` and below it are imported from their source, or are compiled extensions."""
    place = folder.resolve()
    if place in _FOLDERS:
        return
    if not _FOLDERS:
        sys.path_hooks.insert(0, _find_source_only)
    _FOLDERS.add(place)
    for known in list(sys.path_importer_cache):
        if _is_within_folders(Path(known)):
            del sys.path_importer_cache[known]


def _find_source_only(path: str) -> FileFinder:
    """The finder of modules in the folder `path`; raises ImportError where it is in none of the folders named before."""
    if not _is_within_folders(Path(path)):
        raise ImportError(f"{path} is in no folder of an experiment.")
    return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceOnly, SOURCE_SUFFIXES))


def _is_within_folders(path: Path) -> bool:
    """Whether code at `path` is an experiment's own: in a folder named before, and not of an installed package."""
    return any(place.is_relative_to(folder) for place in (path.absolute(), path.resolve()) for folder in _FOLDERS
               ) and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    """Whether `path` is in the Python environment that runs, which may lie in the folder of an experiment."""
    return path.resolve().is_relative_to(Path(sys.prefix).resolve())
