"""Whose code an experiment file may run: fedtail's own, and what whoever reads the file has allowed.

A file names code of its user by `module:name`, and importing a module runs it. So nothing is imported unless the user has said
from where, in the command (`--trust`), in Python (`trust=`) or in a node's own settings; the file itself cannot say it, and no
answer is remembered. Commands that only read a file import nothing at all.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "fedtail"
_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))


@dataclass(frozen=True)
class Trust:
    """The folders and packages from which an experiment file may have code imported, besides fedtail's own; by default none.

    A folder allows the files in it and below it; a package allows what is installed under its name. With `as_written`, names
    of user code are kept as text and none of it is imported.

    >>> Trust.from_names(["torch"]).packages
    ('torch',)
    """

    folders: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    as_written: bool = False

    @classmethod
    def from_names(cls, given: Trust | str | Path | Iterable[str | Path], beside: Path | None = None) -> Trust:
        """Make a Trust from `given`, one or several folders and packages; a Trust is returned unchanged.

        Text that is a dotted name is a package; a `Path`, or other text ("." or with a slash), is a folder, relative to `beside`
        or by default to the current directory. Raises ValueError where a folder does not exist, TypeError for other values.
        """
        if isinstance(given, Trust):
            return given
        folders, packages = [], []
        for one in [given] if isinstance(given, (str, Path)) else list(given):
            text = os.fspath(one) if isinstance(one, Path) else one
            if not isinstance(text, str):
                raise TypeError(f"trust must name folders or packages, got {one!r}. Write \".\" for a folder, \"torch\" for a "
                                "package.")
            if isinstance(one, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text):
                packages.append(text)
                continue
            folder = ((beside or Path()) / Path(text).expanduser()).resolve()
            if not folder.is_dir():
                raise ValueError(f"{text!r} is not a folder, so it cannot be trusted. Write the folder that holds your modules "
                                 "(\".\" is the present one), or the name of an installed package.")
            folders.append(folder)
        return cls(tuple(folders), tuple(packages))

    def allows_file(self, file: Path) -> bool:
        """Whether `file`, with symbolic links resolved, lies in a trusted folder or below one."""
        place = file.resolve()
        return any(place.is_relative_to(folder) for folder in self.folders)

    def allows_package(self, module: str) -> bool:
        """Whether the dotted name `module` is that of a trusted package or of a module in one."""
        return any(module == package or module.startswith(f"{package}.") for package in self.packages)

    def allows_module(self, module: str) -> bool:
        """Whether the module of this dotted name belongs to a trusted package, or was loaded from a file in a trusted folder.

        A module that is not loaded, or has no file, is trusted by its package only.
        """
        file = getattr(sys.modules.get(module), "__file__", None)
        return self.allows_package(module) or (file is not None and self.allows_file(Path(file)))


AS_WRITTEN = Trust(as_written=True)


class UnimportedName(str):
    """The name of a function that was not imported; it stands where the function would, and raises ValueError when called."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise ValueError: the function was not imported, so there is nothing to call."""
        raise ValueError(f"{str(self)!r} was read as a name only, so it cannot be called.")


def is_fedtail_module(module: str) -> bool:
    """Whether the dotted name `module` is "fedtail" or that of a module in it."""
    return module == OURS or module.startswith(f"{OURS}.")


def module_file_in_folder(folder: Path, module: str) -> Path | None:
    """The file that importing `module` would run first if `folder` came first on the import path; None where it has none.

    For a module in a package that is the package's file. Only file names are inspected; nothing is imported.
    """
    parts = module.split(".")
    found = FileFinder(str(folder), *_LOADERS).find_spec(parts[0])
    if found is not None and found.loader is not None and found.origin:
        return Path(found.origin)
    inner = folder.joinpath(*parts)      # below a folder without __init__.py
    return next((file for file in (inner.with_suffix(".py"), inner / "__init__.py") if file.is_file()), None)


def find_attribute(module: ModuleType, path: str, trust: Trust) -> Any:
    """The attribute of `module` at a dotted path, such as "Outer.Inner". Raises AttributeError where there is none.

    Raises PermissionError, with the module's name, where the path leads into another module that is neither fedtail's nor allowed
    by `trust`.
    """
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
        if isinstance(found, ModuleType) and not (is_fedtail_module(found.__name__) or trust.allows_module(found.__name__)):
            raise PermissionError(found.__name__)
    return found


def defining_module(function: Any) -> str:
    """The name of the module in which a function was defined; for a `functools.partial`, that of the function it wraps.

    "builtins" where the function does not say.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or "builtins"
