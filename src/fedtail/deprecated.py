"""Names that have changed. The old ones work for one more version, with a DeprecationWarning that says the new one.

Files that were written with old names are read silently: ledgers, `privacy.json`, and the experiment of a run.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

NAMES = {
    "fedtail": {"NobodyCountedWarning": "NoContributionWarning", "Terms": "PrivacyBudget"},
    "fedtail.deployment": {"Answers": "AnswerReport", "Roster": "ClientRegistry"},
    "fedtail.privacy": {"Table": "DiscreteGaussianTable", "Terms": "PrivacyBudget", "decisive_share": "reveal_probability",
                        "exact": "exact_discrete_gaussian", "probability": "discrete_gaussian_probability"},
    "fedtail.quantiles": {"flat": "flat_strategy", "nobody": "empty_tail", "optimal": "optimal_strategy",
                          "tree": "tree_strategy"},
    "fedtail.secure": {"TogetherClient": "AllOrNothingClient", "TogetherRounds": "AllOrNothingRounds",
                       "TogetherServer": "AllOrNothingServer"},
    "fedtail.training": {"NobodyCountedWarning": "NoContributionWarning"},
}
ATTRIBUTES = {      # by class; those that are fields were keywords too
    "AdaptiveClip": {"now": "current_clip_norm"},
    "AnswerReport": {"asked": "sampled"},
    "ClientRegistry": {"joined": "with_node", "part": "cohort_at"},
    "Experiment": {"computing": "training_engine"},
    "Guarantee": {"against_server": "without_amplification", "experimental": "is_experimental"},
    "Ledger": {"affordable": "affordable_rounds", "began_with": "record_earlier", "terms": "budget"},
    "PoissonSampling": {"decisive": "revealed"},
    "RoundView": {"asked": "sampled", "counted": "contributors", "who_counted": "contributors_of"},
    "SecureChannel": {"hides_among": "minimum_contributors"},
    "Source": {"changed": "with_value", "where": "location"},
}
KEYWORDS = {**ATTRIBUTES, "RemoteFleet": {"roster": "registry"}}
VALUES = {"schedule": {"together": "all-or-nothing"}}


def old_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of which some names have changed."""
    return lambda name: old_name(module, name)


def old_name(module: str, name: str) -> Any:
    """What a module calls otherwise now; an AttributeError where it never had such a name."""
    new = NAMES[module].get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{module}.{new}", stacklevel=3)
    return getattr(importlib.import_module(module), new)


def with_old_names(kind: Kind) -> Kind:
    """A class decorator: attributes and keywords of a class whose names have changed still work."""
    changed: Any = kind
    made = changed.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        made(self, *args, **new_keywords(kind.__name__, given))

    changed.__init__ = init
    for old, new in ATTRIBUTES.get(kind.__name__, {}).items():
        setattr(kind, old, _old_attribute(kind.__name__, old, new))
    return kind


def new_keywords(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a class under their new names, an old one before a new one; warns where there are old ones."""
    changed = KEYWORDS.get(kind, {})
    for old in changed.keys() & given.keys():
        _warn(f"{old} of {kind}", changed[old], stacklevel=3)
    return new_fields(kind, given)


def new_fields(kind: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class as they were written to a file, under their new names."""
    changed = KEYWORDS.get(kind, {})
    return {name: value for name, value in written.items() if name not in changed} | {
        changed[name]: value for name, value in written.items() if name in changed}


def new_tables(table: Any) -> Any:
    """The tables of an experiment as a run has written them, with the fields of all parts under their new names."""
    if isinstance(table, list):
        return [new_tables(entry) for entry in table]
    if not isinstance(table, dict):
        return table
    inner = {name: new_tables(value) for name, value in table.items()}
    return new_fields(inner["part"], inner) if isinstance(inner.get("part"), str) else inner


def new_value(name: str, value: Any) -> Any:
    """The value of a setting as it is written now; warns where it was written otherwise."""
    new = VALUES[name].get(value, value)
    if new != value:
        _warn(f'{name} = "{value}"', f'{name} = "{new}"', stacklevel=4)
    return new


def _old_attribute(kind: str, old: str, new: str) -> property:
    def get(self: Any) -> Any:
        _warn(f"{kind}.{old}", f"{kind}.{new}", stacklevel=2)
        return getattr(self, new)

    def put(self: Any, value: Any) -> None:
        _warn(f"{kind}.{old}", f"{kind}.{new}", stacklevel=2)
        setattr(self, new, value)

    return property(get, put, doc=f"The old name of `{new}`.")


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next version.", DeprecationWarning, stacklevel + 1)
