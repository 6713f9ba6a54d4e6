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
    (without names, those called so); a folder of LEAF's json files; or a folder by `Population.save`. The last two know their
    x, y and clients, and names for them are refused (ValueError). Raises FileNotFoundError where nothing of the kind is
    there.
    """
    place = Path(path).expanduser()
    given = {"x": x, "y": y, "client": client, "group": group, "mass": mass}
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {place}. Pass an .npz or .parquet file, or a folder that holds LEAF's json "
                                "files, a saved population, or a saved data set.")
    if place.is_file():
        read: Any = Population.from_parquet if suffix_of(place) == ".parquet" else Population.from_npz
        return read(place, **_array_names(place, given, list_arrays(place)))
    return _open_folder(place, given, split)


def _open_folder(place: Path, given: dict[str, Any], split: str | None) -> Population:
    """The population in a folder: a saved data set, a saved population, or LEAF's json files.

    `given` holds the names of arrays by role, None where the caller gave none; only a saved data set takes any.
    """
    from fedtail.data.hub import is_dataset_folder, open_dataset

    if is_dataset_folder(place):
        dataset = open_dataset(place, split)
        there = {name: f"({len(dataset)},) {_type_name(feature)}" for name, feature in dataset.features.items()}
        return Population.from_dataset(dataset, **_array_names(place, given, there))
    saved = (place / "population.json").is_file()
    if not saved and not any(place.glob("*.json")):
        raise FileNotFoundError(f"{place} is neither a saved population, nor a saved data set, nor a folder of LEAF's json files."
                                f"{_nearby_folder_hint(place)}")
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"{place} is {'a saved population' if saved else 'a folder of LEAF files'}, whose x, y and clients are "
                         f"known. Leave out {', '.join(named)}.")
    return Population.open(place) if saved else Population.from_leaf(place)


def _array_names(place: Path, given: dict[str, Any], there: dict[str, str]) -> dict[str, Any]:
    """The array to read for each role, roles without one left out.

    `given` names some; x, y and client are otherwise the arrays called so. `there` describes all arrays, for the ValueError
    that is raised where one of the three is missing.
    """
    names = {role: value for role, value in given.items() if value is not None}
    names |= {role: role for role in ("x", "y", "client") if role not in names and role in there}
    missing = [role for role in ("x", "y", "client") if role not in names]
    if missing:
        held = "; ".join(f"{name} {kind}" for name, kind in there.items()) or "nothing"
        raise ValueError(f"{place} has no array called {' or '.join(missing)}. Say which of its arrays to take as "
                         f"{', '.join(missing)}. It holds: {held}.")
    return names


def _type_name(feature: Any) -> str:
    """The type of a data set's column, for an error text: "int64", or "Image"."""
    return str(feature.dtype) if type(feature).__name__ == "Value" else type(feature).__name__


def _nearby_folder_hint(place: Path) -> str:
    """A sentence naming the first folder below that holds json files (LEAF's train or test); empty where there is none."""
    inner = sorted(path.parent for path in place.glob("*/*.json"))
    return f" Did you mean {inner[0]}?" if inner else ""
