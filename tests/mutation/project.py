"""What is mutated and with which tests, read from a TOML file."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mutation.operators import Mutant, mutants


@dataclass(frozen=True)
class Project:
    """A source folder with one package, its tests, and the parts of the package (`areas`) whose mutants are tried."""

    root: Path
    source: str
    package: str
    tests: str
    areas: tuple[str, ...]
    preload: tuple[str, ...]
    left_out: dict[str, str]            # beginnings of names of test files, and why
    reasons: str
    summary: str
    only: tuple[str, ...] = ("",)       # parts of names of test files, one of which a file must have

    @classmethod
    def read(cls, path: Path) -> Project:
        table = tomllib.loads(path.read_text())
        root = (path.parent / table.pop("root")).resolve()
        return cls(root, areas=tuple(table.pop("areas")), preload=tuple(table.pop("preload")), **table)

    @property
    def cache(self) -> Path:
        return self.root / ".mutants"

    @property
    def sources(self) -> Path:
        return self.root / self.source

    @cached_property
    def test_files(self) -> list[Path]:
        files = sorted((self.root / self.tests).glob("test_*.py"))
        return [file for file in files if not any(file.name.startswith(start) for start in self.left_out)
                and any(part in file.name for part in self.only)]

    @property
    def options(self) -> list[str]:
        """For pytest: what was imported beforehand cannot be rewritten, which is no fault of the tests."""
        return [f"--rootdir={self.root}", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio", "-W", "ignore::pytest.PytestAssertRewriteWarning"]

    def files(self, area: str) -> list[str]:
        """The area's files, relative to the source folder; an area is a folder or a module of the package."""
        place = self.sources / self.package / area
        found = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        return [file.relative_to(self.sources).as_posix() for file in found]

    def sample(self, area: str, size: int, seed: int) -> list[Mutant]:
        """`size` mutants of an area, or all where there are fewer: those first in the order of their hashes with the seed."""
        found = [mutant for path in self.files(area) for mutant in mutants(self.sources, path)]
        return sorted(found, key=lambda mutant: mutant.rank(seed))[:size]

    def population(self, area: str) -> int:
        return sum(len(mutants(self.sources, path)) for path in self.files(area))

    def prepare(self) -> None:
        """Imports what every mutant's process needs and none changes, on one thread."""
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        for name in self.preload:
            importlib.import_module(name)
        if "torch" in self.preload:
            importlib.import_module("torch").set_num_threads(1)
        gc.freeze()                     # what is here is not looked through again in every process


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
