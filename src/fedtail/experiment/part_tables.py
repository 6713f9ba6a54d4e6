"""Parts from tables: `part = "Superquantile"` and its fields, checked against the part itself."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtail.deprecated import keywords_with_new_names
from fedtail.errors import FieldError, nearest_hint
from fedtail.experiment.source import Key, Source
from fedtail.experiment.source_only import import_source_only
from fedtail.experiment.trust import UnimportedName, defining_module, find_attribute, is_fedtail_module, module_file_in_folder
from fedtail.experiment.values import NONE, convert_value, type_hints_by_name
from fedtail.reading import short_text


@dataclass(frozen=True)
class Slot:
    """A place for a part, such as the risk: the module whose classes can fill it, and the method that such a class must have."""

    room: str
    needs: str
    default: str | None = None
    without: str = ""                    # a method that says it belongs elsewhere

    def candidates(self) -> dict[str, Any]:
        """The public classes of the slot's module (`room`) that fit the slot, by name; for ANYTHING, those of all slots.

        These are dataclasses, or classes with a method `forward`. The module is imported.
        """
        import fedtail

        if self is ANYTHING:
            return {name: value for slot in SLOTS.values() for name, value in slot.candidates().items()}
        room = importlib.import_module(self.room)
        found = {name: getattr(room, name) for name in getattr(room, "__all__", fedtail.__all__) if hasattr(room, name)}
        made = {name: value for name, value in found.items() if is_dataclass(value) or hasattr(value, "forward")}
        return {name: value for name, value in made.items() if self.fits(value)}

    def fits(self, kind: type) -> bool:
        """Whether the class `kind` defines or inherits the method `needs` (any class does for ""), and not the method `without`.

        For ANYTHING, whether it fits any slot.
        """
        if self is ANYTHING:
            return any(slot.fits(kind) for slot in SLOTS.values())
        own = {name for base in kind.__mro__[:-1] for name in vars(base)}
        return self.needs in (own | {""}) and self.without not in own


ANYTHING = Slot("fedtail", "")
SLOTS = {
    "sample": Slot("fedtail.sampling", "takes_everyone", "Uniform"),
    "availability": Slot("fedtail.sampling", "available"),
    "speeds": Slot("fedtail.speeds", "steps_per_second"),
    "local": Slot("fedtail.local", "updates", "LocalSGD"),
    "risk": Slot("fedtail.risk", "density", "Mean"),
    "aggregate": Slot("fedtail.aggregation", "rows", "WeightedMean"),
    "server": Slot("fedtail.server", "start", "SGD"),
    "iterate": Slot("fedtail.iterates", "keep", "LastIterate"),
    "personal": Slot("fedtail.personal", "train_and_keep", "NoPersonalModels"),
    "channel": Slot("fedtail.channel", "encoding", "PlainChannel"),
    "attack": Slot("fedtail.attacks", "corrupted"),
    "log": Slot("fedtail.loggers", "open_log"),
    "graph": Slot("fedtail.channel", "session", "SparseGraph"),
    "within": Slot("fedtail.risk", "density"),
    "across": Slot("fedtail.risk", "density"),
    "example_risk": Slot("fedtail.risk", "density"),
    "quantile": Slot("fedtail.quantiles", "fit"),
    "histogram": Slot("fedtail.quantiles", "ask", "NoisyHistogram"),
    "noise": Slot("fedtail.privacy", "on_server", "GaussianNoise", without="clip"),
    "schedule": Slot("fedtail.local", "__call__"),
    "penalty": Slot("fedtail.local", "add_gradient"),
    "divisor": Slot("fedtail.divisors", "divide", "NoDivisor"),
    "moment": Slot("fedtail.private_optim", "total_weight", "RMSPropMoment"),
    "work": Slot("fedtail.local", "steps", without="updates"),
    "finetune": Slot("fedtail.local", "updates", "LocalSGD"),
    "on_nodes": Slot("fedtail.evaluation", "client_half", "FederatedEvaluation"),
    "more": Slot("fedtail.evaluation", "edges", "MetricRange"),
    "module": Slot("fedtail.models", "forward"),
}


@dataclass(frozen=True)
class PartPlan:
    """A part that is checked but not made yet: the class or function `target`, and the arguments to call it with.

    `name` is as written in the file, and `key` is where; both are for errors. A module is made once for every seed.
    """

    name: str                            # as written: "SoftmaxRegression", "mine:Net"
    target: Callable[..., Any]
    arguments: dict[str, Any]
    source: Source
    key: Key

    @property
    def has_unimported_code(self) -> bool:
        """Whether the part, or one of its arguments, is user code that was not imported, so that it cannot be made."""
        return self.target is _unimported_part or any(_holds_unimported_plan(value) for value in self.arguments.values())

    def part_or_plan(self) -> Any:
        """Make the part, as `make` does; where it holds user code that was not imported, return the plan itself."""
        return self if self.has_unimported_code else self.make()

    def make(self, **more: Any) -> Any:
        """Call `target` with the planned arguments and `more`; returns the part.

        An error in the call becomes an ExperimentError that names the key in the file; only unexpected kinds of errors in
        fedtail's own code are passed on. Raises ExperimentError too where the part holds user code that was not imported.
        """
        if self.has_unimported_code:
            raise self.source.error_at(self.key, f"{self.name} was read as a name only, so it cannot be made.")
        try:
            return self.target(**self.arguments, **more)
        except (ValueError, TypeError, OSError, ImportError, OverflowError) as reason:
            raise self.source.error_at((*self.key, *self._likely_fields(reason)[:1]), reason) from reason
        except (RuntimeError, MemoryError) as reason:      # what torch says of a size that no memory holds
            text = f"{self.name} failed: {type(reason).__name__}: {short_text(reason)}."
            raise self.source.error_at(self.key, text) from reason
        except Exception as reason:
            if ":" not in self.name:
                raise
            raise self.source.error_at(self.key, f"{self.name} failed: {type(reason).__name__}: {reason}.") from reason

    def _likely_fields(self, reason: Exception) -> list[str]:
        """The names of the arguments that the error `reason` is most likely about, the likeliest first; perhaps none.

        For a FieldError its field, or where it names none the arguments with the value that it refuses. For others, the arguments
        whose text value is quoted in the message, then those whose name occurs in it.
        """
        if isinstance(reason, FieldError):
            holding = [name for name, value in self.arguments.items() if value == reason.came or value == [reason.came]]
            return [reason.field] if reason.field else holding
        quoted = [name for name, value in self.arguments.items() if isinstance(value, str) and repr(value) in str(reason)]
        return quoted + [name for name in self.arguments if re.search(rf"\b{re.escape(name)}\b", str(reason))]

    def as_table(self) -> dict[str, Any]:
        """The part as a dict for an experiment file: `part`, its name, and every field with its value, defaults included."""
        defaults = {name: parameter.default for name, parameter in parameters_by_name(self.target).items()
                    if parameter.default is not parameter.empty}
        return {"part": self.name, **{name: toml_value(value) for name, value in {**defaults, **self.arguments}.items()}}


def build_part(source: Source, key: Key, table: Any, slot: Slot) -> Any:
    """Check `table`, found at `key` of the file `source`, and make the part that it describes, which must fit `slot`.

    Returns a `PartPlan` in its place where it holds user code that was not imported. Raises ExperimentError, which names the key.
    """
    return plan_part(source, key, table, slot).part_or_plan()


def plan_part(source: Source, key: Key, table: Any, slot: Slot) -> PartPlan:
    """Check the part that `table`, found at `key` of the file `source`, describes; returns the plan to make it.

    A text stands for a part without fields, and a table without `part` for the default of `slot`. Parts among the fields are
    made. Raises ExperimentError, which names the key, for an unknown part or field, a missing field or a value that does not fit.
    """
    table = {"part": table} if isinstance(table, str) else table
    if not isinstance(table, Mapping):
        raise source.error_at(key, f"a part is needed, got {table!r}. Write {{ part = \"{_example_part(slot)}\" }} with its "
                                   "fields.")
    name = table.get("part", slot.default)
    if not isinstance(name, str):
        came = "nothing" if name is None else repr(name)
        raise source.error_at(key, f"part must be a name, got {came}. Write part = \"{_example_part(slot)}\"; there are "
                                   f"{', '.join(slot.candidates())}.")
    target = find_part(source, (*key, "part"), name, slot)
    given = keywords_with_new_names(name, {field: value for field, value in table.items() if field != "part"})
    return PartPlan(name, target, checked_arguments(source, key, given, target, name), source, key)


def find_part(source: Source, key: Key, name: str, slot: Slot) -> Callable[..., Any]:
    """The class called `name`: one of fedtail's that fits `slot`, or the user's own as "module:Class", which is imported.

    For a torch module it may also be a user's function that returns one. Where the trust of `source` says that names are not
    imported, a stand-in is returned that raises ValueError when called. Raises ExperimentError about `key` where the name is
    unknown, not trusted, does not fit the slot, or is no dataclass.
    """
    if ":" in name:
        own = import_object(source, key, name)
        if isinstance(own, UnimportedName):
            return plan_target(own)
        if not isinstance(own, type) and not (slot is SLOTS["module"] and callable(own)):
            raise source.error_at(key, f"{name} is not a class, and {key[-2]} needs one with a method "
                                       f"{slot.needs or 'of a part'}.")
        if isinstance(own, type) and not slot.fits(own):
            needs = f"no method {slot.needs}, which {key[-2]} needs" if slot.needs else "the methods of no part"
            raise source.error_at(key, f"{name} has {needs}.")
        if isinstance(own, type) and not (is_dataclass(own) or hasattr(own, "forward")):
            raise source.error_at(key, f"{name} must be a dataclass, so that its fields can be checked and written down. Put "
                                       "@dataclass(frozen=True) above it.")
        return own if isinstance(own, type) else _checked_own_function(source, key, name, own)
    known = slot.candidates()
    if name not in known:
        raise source.error_at(key, f"{slot.room} has no part {name!r} for {key[-2]}. {nearest_hint(name, known)} "
                                   "Your own is written \"module:Class\".")
    return known[name]


def import_function(source: Source, key: Key, name: str) -> Any:
    """Import and return the user's own function, whose `name` is "module:function".

    Where the trust of `source` says that names are not imported, `UnimportedName(name)` is returned. Raises ExperimentError about
    `key` where it cannot be imported, cannot be called, or is defined in code that is not trusted.
    """
    found = import_object(source, key, name)
    return found if isinstance(found, UnimportedName) else _checked_own_function(source, key, name, found)


def import_object(source: Source, key: Key, name: str) -> Any:
    """Import what "module:name" names, from a file in the experiment's folder or else from an installed package; returns it.

    Importing runs code, so `source.trust` must allow the file's folder or the package. Where it says that names are not imported,
    `UnimportedName(name)` is returned for anything but fedtail's own. The experiment's folder is on the import path during this
    import only, and only where it holds the module. Raises ExperimentError about `key` where the name is malformed, not trusted,
    or cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not re.fullmatch(r"[\w.]+:[\w.]+", name) or not all(part.isidentifier() for part in name.replace(":", ".").split(".")):
        raise source.error_at(key, f"{name!r} is not a module and a name. For class Net in mine.py beside this file write "
                                   "\"mine:Net\".")
    beside = None if is_fedtail_module(module) else module_file_in_folder(source.folder, module)
    if not is_fedtail_module(module):
        if source.trust.as_written:
            return UnimportedName(name)
        _refuse_untrusted_code(source, key, name, beside)
    try:
        with _folder_on_import_path(source.folder) if beside else nullcontext():
            found = importlib.import_module(module)
    except ImportError as reason:
        where = source.folder if beside else "the installed packages"
        raise source.error_at(key, f"{name!r} cannot be imported: {reason}. It is looked for in {where}.") from reason
    except Exception as reason:
        raise source.error_at(key, f"importing {module} failed: {type(reason).__name__}: {reason}.") from reason
    own = own_code_file(source.folder, name)
    if beside and own and own.resolve() != Path(getattr(found, "__file__", None) or "").resolve():
        raise source.error_at(key, f"{own} is not what was imported: a module of the same name is loaded from "
                                   f"{getattr(found, '__file__', 'elsewhere')}. Give the file another name.")
    try:
        return find_attribute(found, attribute, source.trust)
    except AttributeError:
        raise source.error_at(key, f"module {module} has no {attribute}.") from None
    except PermissionError as through:
        raise source.error_at(key, f"{name!r} leads into the module {through}, which is not trusted. Name what is defined in "
                                   f"{module} itself.") from None


def _refuse_untrusted_code(source: Source, key: Key, name: str, beside: Path | None) -> None:
    """Raise ExperimentError about `key` where `source.trust` does not allow the import of `name`; otherwise do nothing.

    `beside` is the file it would be imported from, None for an installed package. The text says what would be imported and
    how to allow it.
    """
    module = name.partition(":")[0]
    if beside is not None and not source.trust.allows_file(beside):
        place = beside.resolve().parent
        folder = next((above for above in (place, *place.parents) if source.folder.resolve() == above), place)
        shown = _command_line_folder(folder)
        raise source.error_at(key, f"{name!r} is not fedtail's: it would import {beside}, and that runs the code in it. If you "
                                   f"trust what is in that folder, write --trust {shlex.quote(shown)} (in Python "
                                   f"trust={shown!r}; in node.toml trust = [\".\"] for the node's own folder).")
    if beside is None and not source.trust.allows_package(module):
        package = module.partition(".")[0]
        if not is_installed(package):
            raise source.error_at(key, f"{name!r} names code of your own, and there is no {package}.py in {source.folder}. Write "
                                       f"it there, with {name.partition(':')[2]} in it, and then --trust "
                                       f"{shlex.quote(_command_line_folder(source.folder.resolve()))}.")
        raise source.error_at(key, f"{name!r} is not fedtail's: it would import the installed package {package} (there is no "
                                   f"{package}.py in {source.folder}), and that runs code. If you trust that this file uses it, "
                                   f"write --trust {package} (in Python trust={package!r}; in node.toml "
                                   f"trust = [\"{package}\"]).")


def is_installed(package: str) -> bool:
    """Whether a package can be imported from where Python looks; one loaded from another experiment's folder is not."""
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _command_line_folder(folder: Path) -> str:
    """A folder as one would type it on the command line: "." or "./..." in or below the current directory, else its full path."""
    here = Path.cwd()
    inner = folder.relative_to(here) if folder.is_relative_to(here) else folder
    text = str(inner)
    return text if text == "." or inner.is_absolute() else f"./{text}"


def _checked_own_function(source: Source, key: Key, name: str, found: Any) -> Callable[..., Any]:
    """Return `found`, the user's function called `name`, if it may be used.

    Raises ExperimentError about `key` of the file `source` where it cannot be called, or where it is defined in a module that is
    neither trusted nor `fedtail.losses`.
    """
    if not callable(found):
        raise source.error_at(key, f"{name} is a {type(found).__name__}, a function is needed.")
    home = defining_module(found)
    if not (home == "fedtail.losses" or source.trust.allows_module(home)):
        raise source.error_at(key, f"{name} is a function of {home}, which is not trusted. Define one of your own that calls it, "
                                   f"or write --trust {home.partition('.')[0]} too.")
    return found


def own_code_file(folder: Path, name: str) -> Path | None:
    """The file in `folder`, an experiment's, that holds the module of "module:name" or "module": `module.py` or a package's.

    None where there is none, as for an installed package.
    """
    inner = folder.joinpath(*name.partition(":")[0].split("."))
    return next((file for file in (inner.with_suffix(".py"), inner / "__init__.py") if file.is_file()), None)


def checked_arguments(source: Source, key: Key, table: Mapping[str, Any], target: Callable[..., Any], name: str,
                      skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Check the fields of `table` against the parameters of `target`; returns them as keyword arguments, converted.

    `key` is where the table is in the file `source`. Every field must be known and fit its annotation, and none without a default
    may be missing. Tables that describe parts become parts, names of functions become functions, and "none" becomes None.
    Parameters in `skip` must not be in the table: the caller gives them. `name` is what errors call the target. Raises
    ExperimentError about the key.
    """
    known = {field: p for field, p in parameters_by_name(target).items() if field not in skip}
    for field in table:
        if field not in known and not _accepts_any_keyword(target):
            raise source.error_at((*key, field), f"{name} has no field {field!r}. {nearest_hint(field, known)}")
    for field, parameter in known.items():
        if parameter.default is parameter.empty and field not in table:
            raise source.error_at(key, f"{name} needs {field}, which is missing. Write {field} = ... there.")
    hints = type_hints_by_name(target)
    empty = [field for field, value in table.items() if value == NONE and field in known and known[field].default is None]
    return {field: None if field in empty else _checked_argument(source, (*key, field), value, hints.get(field, Any))
            for field, value in table.items()}


def parameters_by_name(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `target`, a class or function, by name, as `inspect.signature` gives them, without *args and **kwargs."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in inspect.signature(target).parameters.items() if p.kind not in kinds}


def toml_value(value: Any) -> Any:
    """A value as an experiment file would hold it: parts become tables, functions and classes names, None "none", arrays lists.

    Plain values and dicts are returned as they are, anything else as its `str`.
    """
    if value is None:
        return NONE
    if isinstance(value, PartPlan):
        return value.as_table()
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: toml_value(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"part": name_in_file(type(value)), **own}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [toml_value(entry) for entry in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return name_in_file(value)
    plain = isinstance(value, (bool, int, float, str, dict)) and not isinstance(value, UnimportedName)
    return value if plain else str(value)


def name_in_file(value: Any) -> str:
    """The name by which a file refers to `value`, a class or function: "Name" alone if it is fedtail's, else "module:name"."""
    ours = value.__module__.startswith("fedtail.")
    return value.__name__ if ours else f"{value.__module__}:{value.__qualname__}"


def _checked_argument(source: Source, key: Key, value: Any, hint: Any) -> Any:
    """Convert the `value` at `key` of the file `source` to an argument that fits the type hint.

    The argument is a part, a function, a path or a plain value. A table, or in the place of a part also a text, is built as a
    part. Relative paths start at the experiment's folder. Raises ExperimentError about `key` where the value does not fit.
    """
    field = str(key[-1])
    if value == NONE and convert_value(value, hint)[1] is None:
        return None
    if field in SLOTS and (isinstance(value, Mapping) or (isinstance(value, str) and hint is not str)):
        return build_part(source, key, value, SLOTS[field])
    if field in SLOTS and isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return tuple(build_part(source, key, one, SLOTS[field]) for one in value)
    if isinstance(value, Mapping) and "part" in value:
        return build_part(source, key, value, ANYTHING)
    problem, result = convert_value(value, hint, lambda name: _find_loss_function(source, key, name))
    if problem:
        raise source.error_at(key, FieldError(field, problem, value, text=f"{field} must be {problem}, got {value!r}."))
    return source.folder / result if isinstance(result, Path) else result


def _find_loss_function(source: Source, key: Key, name: str) -> Callable[..., Any]:
    """The function of `fedtail.losses` called `name`, or the user's own "module:function", which is imported.

    Raises ExperimentError about `key` of the file `source` where there is none, or where it is not trusted.
    """
    if ":" in name:
        return import_function(source, key, name)
    losses = importlib.import_module("fedtail.losses")
    known = [name for name, value in vars(losses).items()
             if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["outputs", "targets"]]
    if name not in known:
        raise source.error_at(key, f"fedtail.losses has no {name!r}. {nearest_hint(name, known)} "
                                   "Your own is \"module:function\".")
    return getattr(losses, name)


def _example_part(slot: Slot) -> str:
    """The name of a part that fits the slot, for an error text: its default, or else its first candidate."""
    return slot.default or next(iter(slot.candidates()), "module:Class")


def plan_target(found: Any) -> Callable[..., Any]:
    """The callable for a plan: `found` itself or, where it is an `UnimportedName`, a stand-in that takes any fields."""
    return _unimported_part if isinstance(found, UnimportedName) else found


def _unimported_part(**fields: Any) -> Any:
    """Stands in a plan for a user's part that was not imported: takes any fields, and raises ValueError when called."""
    raise ValueError("a part that was read as a name only cannot be made.")


def _holds_unimported_plan(value: Any) -> bool:
    """Whether a value is a plan of code that was not imported, or holds one at any depth of lists and dicts."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_unimported_plan, value))
    if isinstance(value, Mapping):
        return any(map(_holds_unimported_plan, value.values()))
    return isinstance(value, PartPlan) and value.has_unimported_code


def _accepts_any_keyword(target: Callable[..., Any]) -> bool:
    """Whether the function `target` accepts keyword arguments of any name (**kwargs)."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(target).parameters.values())


@contextmanager
def _folder_on_import_path(folder: Path) -> Iterator[None]:
    """Within the block, `folder` is first in `sys.path`, so that its modules are imported before others of the same name.

    It is removed from `sys.path` afterwards; imported modules stay loaded. They are compiled from their source.
    """
    import_source_only(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
