"""Open data by its path alone: a file of arrays, LEAF's json, a saved population, a saved data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.data.population import Population
from fedtail.data.tables import list_arrays, suffix_of


def open_any(
    path: str | Path, x: str | Sequence[str] | None = None, y: str | None = None, client: str | None = None,
    group: str | None = None, mass: str | None = None, split: str | None = None,
) -> Population:
    """A population from whatever lies at `path`.

    An `.npz` or `.parquet` file or a folder by `Dataset.save_to_disk`, whose arrays or columns `x`, `y` and `client` name
    (without names, those called so); a folder of LEAF's json files; or a folder by `Population.save`.
    """
    place = Path(path).expanduser()
    given = {"x": x, "y": y, "client": client, "group": group, "mass": mass}
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {place}. Pass an .npz or .parquet file, or a folder that holds LEAF's json "
                                "files, a saved population, or a saved data set.")
    if place.is_file():
        read: Any = Population.from_parquet if suffix_of(place) == ".parquet" else Population.from_npz
        return read(place, **_named(place, given, list_arrays(place)))
    return _open_folder(place, given, split)


def _open_folder(place: Path, given: dict[str, Any], split: str | None) -> Population:
    """The population in a folder: a saved data set, a saved population, or LEAF's json files."""
    from fedtail.data.hub import is_dataset_folder, open_dataset

    if is_dataset_folder(place):
        dataset = open_dataset(place, split)
        there = {name: f"({len(dataset)},) {_kind(feature)}" for name, feature in dataset.features.items()}
        return Population.from_dataset(dataset, **_named(place, given, there))
    saved = (place / "population.json").is_file()
    if not saved and not any(place.glob("*.json")):
        raise FileNotFoundError(f"{place} is neither a saved population, nor a saved data set, nor a folder of LEAF's json files."
                                f"{_below(place)}")
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"{place} is {'a saved population' if saved else 'a folder of LEAF files'}, whose x, y and clients are "
                         f"known. Leave out {', '.join(named)}.")
    return Population.open(place) if saved else Population.from_leaf(place)


def _named(place: Path, given: dict[str, Any], there: dict[str, str]) -> dict[str, Any]:
    """The names to read by; those of x, y and client are guessed where arrays are called so."""
    names = {role: value for role, value in given.items() if value is not None}
    names |= {role: role for role in ("x", "y", "client") if role not in names and role in there}
    missing = [role for role in ("x", "y", "client") if role not in names]
    if missing:
        held = "; ".join(f"{name} {kind}" for name, kind in there.items()) or "nothing"
        raise ValueError(f"{place} has no array called {' or '.join(missing)}. Say which of its arrays to take as "
                         f"{', '.join(missing)}. It holds: {held}.")
    return names


def _kind(feature: Any) -> str:
    """The type of a column, for an error text."""
    return str(feature.dtype) if type(feature).__name__ == "Value" else type(feature).__name__


def _below(place: Path) -> str:
    """The folder that may have been meant: LEAF writes train and test below its own."""
    inner = sorted(path.parent for path in place.glob("*/*.json"))
    return f" Did you mean {inner[0]}?" if inner else ""
