"""Parts from tables: `part = "Superquantile"` and its fields, checked against the part itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from fedtail.errors import FieldError
from fedtail.experiment.source import Key, Source, nearest
from fedtail.experiment.values import NONE, fitted, hints_of


@dataclass(frozen=True)
class Slot:
    """A place for a part: the room its candidates live in, and the method that makes one of them fit."""

    room: str
    needs: str
    default: str | None = None
    without: str = ""                    # a method that says it belongs elsewhere

    def candidates(self) -> dict[str, Any]:
        """The public parts of the room that fit here."""
        import fedtail

        if self is ANYTHING:
            return {name: value for slot in SLOTS.values() for name, value in slot.candidates().items()}
        room = importlib.import_module(self.room)
        found = {name: getattr(room, name) for name in getattr(room, "__all__", fedtail.__all__) if hasattr(room, name)}
        made = {name: value for name, value in found.items() if is_dataclass(value) or hasattr(value, "forward")}
        return {name: value for name, value in made.items() if self.fits(value)}

    def fits(self, kind: type) -> bool:
        """Whether a class has the method, itself or from a base."""
        own = {name for base in kind.__mro__[:-1] for name in vars(base)}
        return self.needs in (own | {""}) and self.without not in own


ANYTHING = Slot("fedtail", "")
SLOTS = {
    "sample": Slot("fedtail.sampling", "takes_everyone", "Uniform"),
    "local": Slot("fedtail.local", "updates", "LocalSGD"),
    "risk": Slot("fedtail.risk", "density", "Mean"),
    "aggregate": Slot("fedtail.aggregation", "rows", "WeightedMean"),
    "server": Slot("fedtail.server", "start", "SGD"),
    "iterate": Slot("fedtail.iterates", "keep", "LastIterate"),
    "channel": Slot("fedtail.channel", "encoding", "PlainChannel"),
    "quantile": Slot("fedtail.quantiles", "fit"),
    "histogram": Slot("fedtail.quantiles", "ask", "NoisyHistogram"),
    "noise": Slot("fedtail.privacy", "on_server", "GaussianNoise", without="clip"),
    "schedule": Slot("fedtail.local", "__call__"),
    "penalty": Slot("fedtail.local", "add_gradient"),
    "work": Slot("fedtail.local", "steps", without="updates"),
    "finetune": Slot("fedtail.local", "updates", "LocalSGD"),
    "module": Slot("fedtail.models", "forward"),
}


@dataclass(frozen=True)
class PartPlan:
    """A part that is not made yet: what to call, with what. Modules are made once for every seed."""

    name: str                            # as written: "SoftmaxRegression", "mine:Net"
    target: Callable[..., Any]
    arguments: dict[str, Any]
    source: Source
    key: Key

    def make(self, **more: Any) -> Any:
        """Call it; an error says which key of the file it is about."""
        try:
            return self.target(**self.arguments, **more)
        except (ValueError, TypeError, OSError, ImportError) as reason:
            raise self.source.refuse((*self.key, *self._fields_of(reason)[:1]), reason) from reason
        except Exception as reason:
            if ":" not in self.name:
                raise
            raise self.source.refuse(self.key, f"{self.name} failed: {type(reason).__name__}: {reason}.") from reason

    def _fields_of(self, reason: Exception) -> list[str]:
        """The arguments that an error is about: by its field, by the value that came, or (a user's own part) by its words."""
        if isinstance(reason, FieldError):
            holding = [name for name, value in self.arguments.items() if value == reason.came or value == [reason.came]]
            return [reason.field] if reason.field else holding
        quoted = [name for name, value in self.arguments.items() if isinstance(value, str) and repr(value) in str(reason)]
        return quoted + [name for name in self.arguments if re.search(rf"\b{name}\b", str(reason))]

    def table(self) -> dict[str, Any]:
        """As a table with every field, as it would be written in a file."""
        defaults = {name: parameter.default for name, parameter in parameters_of(self.target).items()
                    if parameter.default is not parameter.empty}
        return {"part": self.name, **{name: toml_value(value) for name, value in {**defaults, **self.arguments}.items()}}


def build_part(source: Source, key: Key, table: Any, slot: Slot) -> Any:
    """The part that a table describes."""
    return plan_part(source, key, table, slot).make()


def plan_part(source: Source, key: Key, table: Any, slot: Slot) -> PartPlan:
    """What a table describes, checked as far as it can be without making it."""
    table = {"part": table} if isinstance(table, str) else table
    if not isinstance(table, Mapping):
        raise source.refuse(key, f"a part is needed, got {table!r}. Write {{ part = \"{_example(slot)}\" }} with its fields.")
    name = table.get("part", slot.default)
    if not isinstance(name, str):
        came = "nothing" if name is None else repr(name)
        raise source.refuse(key, f"part must be a name, got {came}. Write part = \"{_example(slot)}\"; there are "
                                 f"{', '.join(slot.candidates())}.")
    target = find_part(source, (*key, "part"), name, slot)
    given = {field: value for field, value in table.items() if field != "part"}
    return PartPlan(name, target, arguments(source, key, given, target, name), source, key)


def find_part(source: Source, key: Key, name: str, slot: Slot) -> Callable[..., Any]:
    """A part by its public name, or a user's own by `module:Class`."""
    if ":" in name:
        own = import_named(source, key, name)
        if isinstance(own, type) and not slot.fits(own):
            raise source.refuse(key, f"{name} has no method {slot.needs}, which {key[-2]} needs.")
        if isinstance(own, type) and not (is_dataclass(own) or hasattr(own, "forward")):
            raise source.refuse(key, f"{name} must be a dataclass, so that its fields can be checked and written down. Put "
                                     "@dataclass(frozen=True) above it.")
        return own
    known = slot.candidates()
    if name not in known:
        raise source.refuse(key, f"{slot.room} has no part {name!r} for {key[-2]}. {nearest(name, known)} "
                                 "Your own is written \"module:Class\".")
    return known[name]


def import_named(source: Source, key: Key, name: str) -> Any:
    """`module:name`, looked for beside the experiment file too."""
    module, _, attribute = name.partition(":")
    if not re.fullmatch(r"[\w.]+:[\w.]+", name) or module.startswith("."):
        raise source.refuse(key, f"{name!r} is not a module and a name. For class Net in mine.py beside this file write "
                                 "\"mine:Net\".")
    beside = own_file(source.folder, name)
    try:
        with _importable(source.folder):
            found = importlib.import_module(module)
    except ImportError as reason:
        raise source.refuse(key, f"{name!r} cannot be imported: {reason}. It is looked for in {source.folder} and among the "
                                 "installed packages.") from reason
    except Exception as reason:
        raise source.refuse(key, f"importing {module} failed: {type(reason).__name__}: {reason}.") from reason
    if beside and beside.resolve() != Path(getattr(found, "__file__", None) or "").resolve():
        raise source.refuse(key, f"{beside} is not what was imported: a module of the same name is loaded from "
                                 f"{getattr(found, '__file__', 'elsewhere')}. Give the file another name.")
    try:
        return functools.reduce(getattr, attribute.split("."), found)
    except AttributeError:
        raise source.refuse(key, f"module {module} has no {attribute}.") from None


def own_file(folder: Path, name: str) -> Path | None:
    """The file beside an experiment that `module:name` is in; None for an installed package."""
    beside = folder.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")
    return beside if beside.is_file() else None


def arguments(source: Source, key: Key, table: Mapping[str, Any], target: Callable[..., Any], name: str,
              skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a table as arguments for `target`: known, all there, of the right kind."""
    known = {field: p for field, p in parameters_of(target).items() if field not in skip}
    for field in table:
        if field not in known and not _takes_any(target):
            raise source.refuse((*key, field), f"{name} has no field {field!r}. {nearest(field, known)}")
    for field, parameter in known.items():
        if parameter.default is parameter.empty and field not in table:
            raise source.refuse(key, f"{name} needs {field}, which is missing. Write {field} = ... there.")
    hints = hints_of(target)
    empty = [field for field, value in table.items() if value == NONE and field in known and known[field].default is None]
    return {field: None if field in empty else _argument(source, (*key, field), value, hints.get(field, Any))
            for field, value in table.items()}


def parameters_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a class or function that have a name, without *args and **kwargs."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in inspect.signature(target).parameters.items() if p.kind not in kinds}


def toml_value(value: Any) -> Any:
    """A value as an experiment file would hold it."""
    if value is None:
        return NONE
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: toml_value(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"part": name_of(type(value)), **own}
    if isinstance(value, (list, tuple)):
        return [toml_value(entry) for entry in value]
    if isinstance(value, PartPlan):
        return value.table()
    if callable(value) and hasattr(value, "__qualname__"):
        return name_of(value)
    return value if isinstance(value, (bool, int, float, str, dict)) else str(value)


def name_of(value: Any) -> str:
    """How a file names a class or a function: alone if it is one of ours, else `module:name`."""
    ours = value.__module__.startswith("fedtail.")
    return value.__name__ if ours else f"{value.__module__}:{value.__qualname__}"


def _argument(source: Source, key: Key, value: Any, hint: Any) -> Any:
    """A value of a file as an argument: a part, a function, a path, or a plain value of the right kind."""
    field = str(key[-1])
    if value == NONE and fitted(value, hint)[1] is None:
        return None
    if field in SLOTS and (isinstance(value, Mapping) or (isinstance(value, str) and hint is not str)):
        return build_part(source, key, value, SLOTS[field])
    if isinstance(value, Mapping) and "part" in value:
        return build_part(source, key, value, ANYTHING)
    problem, result = fitted(value, hint, lambda name: _function(source, key, name))
    if problem:
        raise source.refuse(key, FieldError(field, problem, value, text=f"{field} must be {problem}, got {value!r}."))
    return source.folder / result if isinstance(result, Path) else result


def _function(source: Source, key: Key, name: str) -> Callable[..., Any]:
    """A function by its name in `fedtail.losses`, or a user's own by `module:function`."""
    if ":" in name:
        return import_named(source, key, name)
    losses = importlib.import_module("fedtail.losses")
    known = [name for name, value in vars(losses).items()
             if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["outputs", "targets"]]
    if name not in known:
        raise source.refuse(key, f"fedtail.losses has no {name!r}. {nearest(name, known)} Your own is \"module:function\".")
    return getattr(losses, name)


def _example(slot: Slot) -> str:
    """A part to name in an error text."""
    return slot.default or next(iter(slot.candidates()), "module:Class")


def _takes_any(target: Callable[..., Any]) -> bool:
    """Whether a function takes fields of any name, **kwargs."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules beside the experiment file can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
