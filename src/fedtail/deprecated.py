"""Names that have changed. The old ones work for one more version, with a DeprecationWarning that says the new one.

Files that were written with old names are read silently: ledgers, `privacy.json`, and the experiment of a run.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

NAMES = {
    "fedtail": {"NobodyCountedWarning": "NoContributionWarning", "Terms": "PrivacyBudget"},
    "fedtail.base_part": {"unsent": "unsent_field", "with_declared": "classes_sent_with"},
    "fedtail.composition": {
        "aggregator_has_its_slope": "slope_refusals", "channel_carries_the_rows": "channel_refusals",
        "check": "check_composition", "enough_clients_contribute": "few_contributors_refusals",
        "integers_resolve_the_weights": "small_weight_refusals",
        "memory_lasts": "lost_memory_refusals", "noise_makes_it_private": "private_risk_refusals",
        "others_hide_what_a_node_knows": "node_noise_refusals", "risk_has_its_clients": "client_and_group_refusals",
        "sampler_fits": "sampler_refusals", "sums_are_divided_by_what_they_weigh": "divisor_refusals"},
    "fedtail.data.fetching": {"Source": "PublicFile", "named": "find_public_set"},
    "fedtail.data.opening": {"open_any": "open_any_data"},
    "fedtail.deployment": {"Answers": "AnswerReport", "Roster": "ClientRegistry"},
    "fedtail.evaluation": {"table": "text_table"},
    "fedtail.experiment": {"seeds_of": "parse_seeds"},
    "fedtail.parts": {"Present": "PresentClients", "side_by_side": "join_conversations"},
    "fedtail.privacy": {"Table": "DiscreteGaussianTable", "Terms": "PrivacyBudget", "decisive_share": "reveal_probability",
                        "exact": "exact_discrete_gaussian", "minimum_for": "minimum_cohort_for",
                        "probability": "discrete_gaussian_probability"},
    "fedtail.quantiles": {"boundary": "boundary_dual", "flat": "flat_strategy", "nobody": "empty_tail",
                          "optimal": "optimal_strategy", "tree": "tree_strategy"},
    "fedtail.questions": {
        "arranged": "fedtail.conversations.arrange_answers", "bound_for": "fedtail.answering.row_bound_for",
        "changed": "fedtail.conversations.replace_fields", "changing": "fedtail.conversations.with_question_fields",
        "refuse_coarse": "fedtail.answering.refuse_rounding_after_noise",
        "side_by_side": "fedtail.conversations.join_conversations", "silent_clients": "fedtail.answering.count_silent_clients",
        **{name: f"fedtail.conversations.{name}" for name in (
            "Conversation", "Joint", "arrange_answers", "change_question", "converse", "join_conversations", "replace_fields",
            "single_questions", "with_changed_questions", "with_question_fields")},
        **{name: f"fedtail.answering.{name}" for name in (
            "Encoding", "answer", "count_silent_clients", "refuse_rounding_after_noise", "row_bound_for")}},
    "fedtail.secure": {"TogetherClient": "AllOrNothingClient", "TogetherRounds": "AllOrNothingRounds",
                       "TogetherServer": "AllOrNothingServer", "centred": "centre_residues"},
    "fedtail.training": {"NobodyCountedWarning": "NoContributionWarning"},
}
_OF_FLEETS = {"close": "close_round", "draw": "draw_cohort", "open": "open_round", "recall": "restore_memory",
              "silent": "count_silent_clients", "view": "round_view"}
ATTRIBUTES = {      # by class; those that are fields were keywords too
    "AdaptiveClip": {"now": "current_clip_norm"},
    "AllOrNothingClient": {"asked": "checked_query", "hear": "store_key_list", "masked": "masked_row"},
    "AllOrNothingRounds": {"again": "retry"},
    "AllOrNothingServer": {"again": "retry", "known": "members_with_keys", "missing": "missing_members"},
    "AnswerReport": {"asked": "sampled", "line": "as_dict"},
    "Channel": {"described": "label_for_fleet", "lose_few": "check_enough_answers", "refuse_fleet": "fleet_refusals"},
    "Client": {"asked": "checked_query", "done": "is_done", "masked": "masked_row"},
    "ClientHistogram": {"clients": "num_clients"},
    "ClientRegistry": {"counts": "clients_per_node", "joined": "with_node", "nodes": "num_nodes", "part": "cohort_at"},
    "Clients": {"draws": "random_bits", "kept": "kept_rows", "one_by_one": "batches_of_one", "remember": "store_rows",
                "reseed": "seed_torch", "split": "examples_in_split"},
    "ClientStatistics": {"weighted": "with_density"},
    "Composition": {"declared": "declarations", "innermost": "innermost_risk", "names": "risk_and_aggregator_names"},
    "DiscreteGaussianTable": {"of": "from_variance"},
    "Edges": {"equal": "of_equal_width", "given": "from_values", "place": "bin_indices"},
    "Experiment": {"computing": "training_engine", "evaluating": "evaluation_engine", "own_code": "own_code_digests",
                   "table": "as_table"},
    "Family": {"lost": "after_lost_round", "minimum": "minimum_cohort", "skip": "after_skipped_round", "start": "initial_state"},
    "FederatedAlgorithm": {"lost": "after_lost_round", "minimum": "minimum_cohort", "skip": "after_skipped_round",
                           "start": "initial_state"},
    "FederatedEvaluation": {"read": "evaluation_from_sums", "round": "round_with_evaluation"},
    "FixedPoint": {"resolves": "resolves_ratios"},
    "Guarantee": {"against_server": "without_amplification", "experimental": "is_experimental"},
    "Identity": {"check": "check_signatures", "public": "public_key", "signed": "sign_keys", "vouches": "is_signature_of",
                 "with_numbers": "with_numbered_pins"},
    "Ledger": {"affordable": "affordable_rounds", "as_of": "copy_of_first_bytes", "before": "earlier_histories",
               "began_with": "record_earlier_history", "check": "check_against_mark", "limits": "describe_earlier_model",
               "mark": "file_mark", "non_private": "non_private_releases", "numbers": "round_numbers",
               "sources": "randomness_sources", "terms": "budget", "vouches_for": "covers_rounds"},
    "LocalFleet": {"begin": "open_with_memory", "give_up_rows": "pop_large_rows", "note": "restore_round_results",
                   "notes": "round_results", "stamp": "rows_stamp"},
    "MetricRange": {"read": "histogram_from_sums"},
    "NoisyHistogram": {"ask": "ask_histogram", "binned": "binned_losses"},
    "Node": {"recall": "restore", "row": "integer_row", "tell": "receive_broadcast"},
    "PoissonSampling": {"decisive": "revealed"},
    "Population": {"examples": "example_clients_and_rows", "pieces": "client_blocks"},
    "QuantilePlan": {"epsilon_of": "epsilon_of_releases", "table": "noise_table"},
    "RemoteFleet": {"answered_beside_largest": "answers_outside_largest_node", **_OF_FLEETS},
    "RoundView": {"asked": "sampled", "cohort": "cohort_size", "contributors": "num_contributors", "counted": "num_contributors",
                  "failed": "num_failed", "who_counted": "contributors_of"},
    "RowFile": {"check": "check_row_type", "clear": "clear_row", "copy": "copy_row", "goes_with": "make_temporary",
                "head": "row_header", "holds": "is_long_enough_for", "read": "read_row", "settle": "sync",
                "state": "file_state", "write": "write_row"},
    "RowFolder": {"forget": "drop_stores", "hold": "start_writing", "recall": "restore_rows", "release": "stop_writing",
                  "reserve": "reserve_places", "rows": "rows_by_name", "sweep": "remove_unused_files"},
    "RowPlaces": {"created": "new_files", "path": "new_file_path", "written": "read_written_rows"},
    "RowStore": {"borrow": "borrow_rows", "files": "num_files", "go_on": "resume_writing", "leave": "stop_writing",
                 "live": "num_keys"},
    "Rows": {"copied": "copy_to", "find": "row_references"},
    "Run": {"most_bytes": "max_message_bytes"},
    "RunFolder": {"deployed": "is_deployed", "finished": "is_finished", "from_histogram": "values_from_histogram",
                  "of_clients": "client_columns", "promise": "privacy_line", "tabled": "has_client_table",
                  "tested": "tested_split"},
    "SecureChannel": {"hides_among": "minimum_contributors"},
    "Session": {"agree_to": "check_secrecy", "holders": "share_holders", "key_answer": "key_confirmation",
                "kind_sent": "wire_class", "most_bytes": "max_message_bytes", "partners": "share_partners",
                "points": "share_points", "read": "from_wire_message", "sent": "to_wire_message"},
    "SignedGraph": {"requirements": "client_arguments"},
    "SimulatedFleet": _OF_FLEETS,
    "Site": {"recall": "restore"},
    "Source": {"changed": "with_value", "refuse": "error_at", "table": "section_table", "where": "location"},
    "SparseGraph": {"requirements": "client_arguments"},
    "SparseSession": {"bits": "member_bits"},
    "State": {"keeping": "with_part_state", "of": "part_state", "optimizer": "optimizer_state"},
    "Strategy": {"exchange": "exchange_factor"},
    "WeightedClients": {"share": "weight_at_unit_mass"},
}
KEYWORDS = {**ATTRIBUTES, "RemoteFleet": {**ATTRIBUTES["RemoteFleet"], "roster": "registry"}}
VALUES = {"schedule": {"together": "all-or-nothing"}}


def old_names(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for the module with this name: it gives the object that a deprecated name stands for, with a warning.

    It raises AttributeError for any other name.
    """
    return lambda name: object_of_old_name(module, name)


def object_of_old_name(module: str, name: str) -> Any:
    """The object that a deprecated name of a module stands for; warns with a DeprecationWarning that says the new name.

    Raises AttributeError for a name that is not deprecated.
    """
    new = NAMES[module].get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place, _, name_there = (new if "." in new else f"{module}.{new}").rpartition(".")      # with a dot: in another module
    _warn_of_old_name(f"{module}.{name}", f"{place}.{name_there}", stacklevel=3)
    return getattr(importlib.import_module(place), name_there)


def with_old_names(kind: Kind) -> Kind:
    """A decorator of the class `kind` by which its deprecated attributes and keywords still work, with a DeprecationWarning.

    Which ones these are is in `ATTRIBUTES` and `KEYWORDS`, under the name of the class. Changes the class in place and returns
    it.
    """
    changed: Any = kind
    made = changed.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        """Call the class's own `__init__` with deprecated keywords under their new names."""
        made(self, *args, **keywords_with_new_names(kind.__name__, given))

    if set(KEYWORDS.get(kind.__name__, {}).values()) & signature(made).parameters.keys():      # others are made as fast
        changed.__init__ = init
    for old, new in ATTRIBUTES.get(kind.__name__, {}).items():
        setattr(kind, old, _old_attribute_property(kind.__name__, old, new))
    return kind


def keywords_with_new_names(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords `given` to the class named `kind`, with deprecated names replaced by the new ones.

    Warns with a DeprecationWarning of each deprecated keyword; where both names were given, the value under the old one is taken.
    """
    changed = KEYWORDS.get(kind, {})
    for old in changed.keys() & given.keys():
        _warn_of_old_name(f"{old} of {kind}", changed[old], stacklevel=3)
    return fields_with_new_names(kind, given)


def fields_with_new_names(kind: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the class named `kind`, as `written` to a file, with deprecated names replaced by new ones; no warning."""
    changed = KEYWORDS.get(kind, {})
    return {name: value for name, value in written.items() if name not in changed} | {
        changed[name]: value for name, value in written.items() if name in changed}


def tables_with_new_names(table: Any) -> Any:
    """A copy of an experiment's tables, as a run wrote them, with deprecated names of the parts' fields replaced by the new ones.

    A table is that of a part if it has a text under "part", the class name. Lists and nested tables are gone through; values of
    other types are returned as they are.
    """
    if isinstance(table, list):
        return [tables_with_new_names(entry) for entry in table]
    if not isinstance(table, dict):
        return table
    inner = {name: tables_with_new_names(value) for name, value in table.items()}
    return fields_with_new_names(inner["part"], inner) if isinstance(inner.get("part"), str) else inner


def value_with_new_name(name: str, value: Any) -> Any:
    """The value of the setting `name`; a deprecated one is replaced by its new name, with a DeprecationWarning.

    Raises KeyError for a setting that never had a deprecated value.
    """
    new = VALUES[name].get(value, value)
    if new != value:
        _warn_of_old_name(f'{name} = "{value}"', f'{name} = "{new}"', stacklevel=4)
    return new


def overrides_under_new_name(kind: type, old: str, new: str) -> None:
    """Where the subclass `kind` defines the method `old`, set its attribute `new` to that method too, with a DeprecationWarning.

    For base classes whose methods users override: a user's class that overrides the deprecated name then overrides the new one.
    To be called from `__init_subclass__`. Nothing is done where the class itself does not define `old`.
    """
    if old in vars(kind):
        _warn_of_old_name(f"{kind.__name__}.{old}", f"{kind.__name__}.{new}", stacklevel=3)
        setattr(kind, new, vars(kind)[old])


class _OldAttribute(property):
    """A property for a deprecated attribute or method; a class method can be reached through the class itself too."""

    new: str        # the name that replaces it

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The attribute under its new name, with a DeprecationWarning.

        Read on the class itself (`instance` is None), a class method is returned so too; for anything else this property is
        returned.
        """
        if instance is None and isinstance(inspect.getattr_static(owner, self.new, None), classmethod):
            instance = owner
        return super().__get__(instance, owner)


def _old_attribute_property(kind: str, old: str, new: str) -> property:
    """A property for the deprecated attribute `old`, which reads and sets the attribute `new` with a DeprecationWarning.

    `kind` is the name of the class, for the warning.
    """
    def get_new(self: Any) -> Any:
        """Warn of the deprecated name, and return the attribute under its new name."""
        _warn_of_old_name(f"{kind}.{old}", f"{kind}.{new}", stacklevel=3)
        return getattr(self, new)

    def set_new(self: Any, value: Any) -> None:
        """Warn of the deprecated name, and set the attribute under its new name to `value`; a frozen class raises as usual."""
        _warn_of_old_name(f"{kind}.{old}", f"{kind}.{new}", stacklevel=2)
        setattr(self, new, value)

    found = _OldAttribute(get_new, set_new)
    found.__doc__, found.new = f"The old name of `{new}`.", new
    return found


def _warn_of_old_name(old: str, new: str, stacklevel: int) -> None:
    """Issue a DeprecationWarning that `old` is now `new`; it points at the caller of this function where `stacklevel` is 1."""
    warnings.warn(f"{old} is now {new}; the old name goes with the next version.", DeprecationWarning, stacklevel + 1)
