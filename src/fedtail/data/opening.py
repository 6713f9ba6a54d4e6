"""Open data by its path alone: a file of arrays, LEAF's json, a saved population, a saved data set."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail.data.population import Population
from fedtail.data.tables import checked_suffix, list_arrays, other_columns, read_file
from fedtail.deprecated import old_names
from fedtail.errors import nearest_hint

LISTS = "lists"
_NUMBER = re.compile(r"(^|\) )(u?int\d+|halffloat|float|double|bool)$")        # how a column of single numbers is described
_TEXT = re.compile(r"(^|\) )(large_)?string(_view)?$")


def open_any_data(
    path: str | Path, x: str | Sequence[str] | None = None, y: str | None = None, client: str | None = None,
    group: str | None = None, mass: str | None = None, split: str | None = None,
) -> Population:
    """A population from the file or folder at `path`, whatever kind of data it holds.

    It may be an `.npz`, `.parquet` or `.csv` file, or a folder by `Dataset.save_to_disk` (with `split`, where there are several).
    Then `x`, `y`, `client`, `group` and `mass` name arrays or columns; the first three default to "x", "y" and "client", and
    there is no group or mass by default. Where a table has no column "x", all columns without another role are the inputs if
    they hold single numbers. It may also be a folder of LEAF's json files or one by `Population.save`; names for these raise
    ValueError. Raises FileNotFoundError where there is nothing at `path` or the folder holds none of these, ValueError where an
    array is missing or the file has another suffix.
    """
    place = Path(path).expanduser()
    given = {"x": x, "y": y, "client": client, "group": group, "mass": mass}
    if not place.exists():
        raise FileNotFoundError(f"there is nothing at {place}. Pass an .npz, .parquet or .csv file, or a folder that holds "
                                "LEAF's json files, a saved population, or a saved data set.")
    if place.is_file():
        return Population.from_arrays(**read_file(place, **names_by_role(place, x, y, client, group, mass)))
    return _open_folder(place, given, split)


def names_by_role(place: str | Path, x: str | Sequence[str] | None = None, y: str | None = None, client: str | None = None,
                  group: str | None = None, mass: str | None = None) -> dict[str, Any]:
    """The arrays or columns of the file `place` that are x, y, client and, where they are given, group and mass, by role.

    Those that are not given are the ones called so; in a table without a column "x" it is the list of all that have no other
    role, if they hold single numbers. Raises ValueError, which lists what there is, where one is missing, with the nearest name
    for one that is not there, and for columns of text, dates or lists beside those of numbers.
    """
    there, given = list_arrays(place), {"x": x, "y": y, "client": client, "group": group, "mass": mass}
    for name in (y, client):
        if isinstance(name, str) and name not in there:
            raise ValueError(f"{place} holds no {name!r}. {nearest_hint(name, there)}")
    if x is None and "x" not in there and checked_suffix(place) != ".npz" and {y or "y", client or "client"} <= there.keys():
        others = other_columns(there, y or "y", client or "client", group, mass)
        _refuse_columns_without_numbers(place, others, there)
        given["x"] = others if all(_NUMBER.search(there[name]) for name in others) else None
    return _array_names_by_role(Path(place), given, there)


def _refuse_columns_without_numbers(place: str | Path, names: Sequence[str], there: dict[str, str]) -> None:
    """Raise ValueError, which says what to do, where some columns in `names` of a table hold numbers and some hold other things.

    `there` describes the columns of `place` by name; all are listed where a column of lists may be the input. Nothing is raised
    where none holds numbers.
    """
    numbers = [name for name in names if _NUMBER.search(there[name])]
    others: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if name not in numbers:
            others.setdefault(_kind_and_advice(name, there[name]), []).append(name)
    if not numbers or not others:
        return
    holds = ", ".join(f"column {found[0]!r} holds {kind}" if len(found) == 1 else
                      f"columns {', '.join(map(repr, found))} hold {kind}" for (kind, _), found in others.items())
    advice = "; ".join(advice for _, advice in others)
    them = "it" if sum(map(len, others.values())) == 1 else "them"
    options = " ".join(f"--x {shlex.quote(name)}" for name in numbers)
    text = f"{holds}, and x takes numbers. {advice[0].upper()}{advice[1:]}, or leave {them} out: on the command line {options}."
    if any(kind == LISTS for kind, _ in others):
        text = (f"{_nothing_called_text(place, ['x'], there)} {text[0].upper()}{text[1:].replace(' on the command line', '')} "
                "On the command line write --x NAME.")
    raise ValueError(text)


def _kind_and_advice(name: str, described: str) -> tuple[str, str]:
    """What a column that holds no single numbers holds, in words, and what to make of it; `described` is its type as listed."""
    kind = described.rpartition(") ")[2] if described.startswith("(") else described
    if _TEXT.search(described) or kind.startswith("dictionary<values=string"):
        return "text", "encode text first (pandas.get_dummies makes a column of each value)"
    if kind.startswith(("date", "time", "duration")):
        return "dates or times", "make numbers of times first, such as days since a day that is the same for everybody"
    if "list<" in kind:
        return LISTS, f"make columns of single numbers of lists first, or take one as the only input (--x {shlex.quote(name)})"
    return kind, f"make numbers of {kind} first"


def _open_folder(place: Path, given: dict[str, Any], split: str | None) -> Population:
    """The population in the folder `place`: a data set by `save_to_disk`, a saved population, or LEAF's json files.

    `given` maps the roles x, y, client, group and mass to array names, or None; only a data set may have any (else ValueError).
    `split` chooses from a data set with several. Raises FileNotFoundError where the folder is none of the three.
    """
    from fedtail.data.hub import is_dataset_folder, open_dataset

    if is_dataset_folder(place):
        dataset = open_dataset(place, split)
        there = {name: f"({len(dataset)},) {_column_type_name(feature)}" for name, feature in dataset.features.items()}
        return Population.from_dataset(dataset, **_array_names_by_role(place, given, there))
    saved = (place / "population.json").is_file()
    if not saved and not any(place.glob("*.json")):
        raise FileNotFoundError(f"{place} is neither a saved population, nor a saved data set, nor a folder of LEAF's json files."
                                f"{_nearby_folder_hint(place)}")
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(f"{place} is {'a saved population' if saved else 'a folder of LEAF files'}, whose x, y and clients are "
                         f"known. Leave out {', '.join(named)}.")
    return Population.open(place) if saved else Population.from_leaf(place)


def _array_names_by_role(place: Path, given: dict[str, Any], there: dict[str, str]) -> dict[str, Any]:
    """A dict from role (x, y, client, group, mass) to the name of the array to read; roles without one are left out.

    `given` maps roles to names, or None; x, y and client are by default the arrays called so. `there` describes all arrays of
    the file by name. Raises ValueError, which lists them and says `place`, where one of the three is missing.
    """
    names = {role: value for role, value in given.items() if value is not None}
    names |= {role: role for role in ("x", "y", "client") if role not in names and role in there}
    missing = [role for role in ("x", "y", "client") if role not in names]
    if place.suffix.lower() in (".csv", ".parquet") and len(missing) > 1:       # of a table, x is what has no other role
        missing = [role for role in missing if role != "x"]
    if missing:
        options = " ".join(f"--{role} NAME" for role in missing)
        raise ValueError(f"{_nothing_called_text(place, missing, there)} On the command line write {options}.")
    return names


def _nothing_called_text(place: str | Path, missing: Sequence[str], there: dict[str, str]) -> str:
    """That a file has no arrays called as the `missing` roles are, and which it has, by `there`."""
    held = "; ".join(f"{name} {kind}" for name, kind in there.items()) or "nothing"
    return (f"{place} has no array called {' or '.join(missing)}. Say which of its arrays to take as {', '.join(missing)}. It "
            f"holds: {held}.")


def _column_type_name(feature: Any) -> str:
    """The type of a data set's column (a `datasets` feature) as text, for an error: "int64", or a class name such as "Image"."""
    return str(feature.dtype) if type(feature).__name__ == "Value" else type(feature).__name__


def _nearby_folder_hint(place: Path) -> str:
    """Text such as " Did you mean data/train?", with the first subfolder of `place` that holds json files.

    Empty where there is none.
    """
    inner = sorted(path.parent for path in place.glob("*/*.json"))
    return f" Did you mean {inner[0]}?" if inner else ""


__getattr__ = old_names(__name__)
