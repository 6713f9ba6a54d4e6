"""What is known of a run's rounds, as a table: who took part, and the statistics of every evaluation."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from fedtail.algorithm import Method, State, member_states

if TYPE_CHECKING:
    import pandas

    from fedtail.fleet import RoundView

Row = dict[str, Any]
SHOWN = 5                                   # first and last rows of a short form


class History(Sequence[Row]):
    """Numbers by round: a sequence of dicts, one for each round and, for a family, for each of its models.

    Every row has `round` and, for a family, `model`, the position of a model. The simulator adds `cohort_size`, `contributors`,
    `failed` and, for risks with a tail, `threshold`, the loss at which it begins. Evaluations add statistics over clients, called
    by who was evaluated, the metric and the statistic, such as "validation.error.worst10". `history["threshold"]` is a column.

    A history grows by sharing its rows, so that one for every round costs no more than the last.

    >>> history = History([{"round": 1, "failed": 0}, {"round": 2, "failed": 3}])
    >>> history["failed"], history[-1]["round"]
    ([0, 3], 2)
    """

    def __init__(self, rows: Iterable[Row] = ()):
        """A history of these rows, in this order; `with_rows` makes longer ones."""
        self._rows = list(rows)
        self._end = len(self._rows)

    def with_rows(self, rows: Sequence[Row]) -> History:
        """A history with these rows added at its end; a row about the round and model of one of its last rows is joined to that.

        This history stays as it is.
        """
        made, shared = History.__new__(History), self._rows
        near = range(max(0, self._end - len(rows)), self._end)
        last = {_place(shared[k]): k for k in near}
        joined = any(_place(row) in last for row in rows)
        if joined or len(shared) != self._end:      # the rows of another history are left alone
            shared = shared[:self._end]
        for row in rows:
            if _place(row) in last:
                shared[last[_place(row)]] = {**shared[last[_place(row)]], **row}
            else:
                shared.append(row)
        made._rows, made._end = shared, len(shared)
        return made

    def __len__(self) -> int:
        """The number of rows."""
        return self._end

    def __iter__(self) -> Iterator[Row]:
        """The rows, in order of rounds."""
        return iter(self._rows[:self._end])

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...
    @overload
    def __getitem__(self, place: str) -> list[Any]: ...

    def __getitem__(self, place: int | slice | str) -> Any:
        """A row by position, rows by a slice, or a column by name: the values of all rows that have it.

        Raises KeyError, which lists the columns there are, for another name.
        """
        if not isinstance(place, str):
            return self._rows[:self._end][place] if isinstance(place, slice) else self._rows[range(self._end)[place]]
        if place not in self.columns:
            raise KeyError(f"the history has no column {place!r}; there are {', '.join(self.columns) or 'none'}.")
        return [row[place] for row in self if place in row]

    def __eq__(self, other: object) -> bool:
        """Whether the other is a history with equal rows."""
        return list(self) == list(other) if isinstance(other, History) else NotImplemented

    __hash__ = None      # type: ignore[assignment]      # rows are dicts

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self for name in row))

    def of_model(self, model: int) -> History:
        """The rows about the model at position `model` of a family; all rows where there is one model only."""
        return History(row for row in self if row.get("model", model) == model)

    def to_pandas(self) -> pandas.DataFrame:
        """The history as a data frame with a row for each round (and model); what a row does not have is NaN.

        Raises ImportError, with what to install, where pandas is missing.
        """
        return data_frame(list(self), self.columns)

    def __repr__(self) -> str:
        """The number of rounds, and the last row."""
        if not len(self):
            return "History(no rounds)"
        last = ", ".join(f"{name} {_number_text(value)}" for name, value in self[-1].items())
        return f"History({len({row['round'] for row in self})} rounds; last: {last})"

    def _repr_html_(self) -> str:
        """The first and last rows as a table, for notebooks."""
        rows = list(self) if len(self) <= 2 * SHOWN else [*self[:SHOWN], {}, *self[-SHOWN:]]
        cells = [[_number_text(row.get(name, "" if row else "…")) for name in self.columns] for row in rows]
        return html_table(self.columns, cells)


def round_rows(method: Method, state: Any, view: RoundView | None) -> list[Row]:
    """The rows of a history about the last round of a run of `method`, which is now in `state`: one for each model.

    `view` is what the simulator sees of the round; None at nodes, where only the round's number is known.
    """
    states = member_states(state)
    rows: list[Row] = []
    for model, (member, now) in enumerate(zip(method.members, states, strict=True)):
        row: Row = {"round": now.round, **({"model": model} if len(states) > 1 else {})}
        if view is not None:
            count = view.num_contributors if len(states) == 1 else len(view.contributors_of(model))
            row |= {"cohort_size": view.cohort_size, "contributors": count, "failed": view.num_failed}
            start = tail_threshold(member.risk.for_cohort(view.cohort_size), now)
            row |= {} if start is None else {"threshold": start}
        rows.append(row)
    return rows


def tail_threshold(risk: Any, state: State) -> float | None:
    """The loss at which the tail of the risk begins in this state; None where the risk has no tail or the loss is not finite."""
    start = None if state.dual is None else risk.tail_start(state.dual)
    return start if start is not None and math.isfinite(start) else None


def data_frame(rows: Sequence[Row], columns: Sequence[str]) -> pandas.DataFrame:
    """A pandas data frame of these rows with these columns, in order.

    Raises ImportError, with what to install, where pandas is missing.
    """
    try:
        import pandas
    except ImportError as reason:
        raise ImportError("to_pandas needs pandas, which fedtail itself does not. Write pip install pandas.") from reason
    return pandas.DataFrame([dict(row) for row in rows], columns=list(columns))


def html_table(columns: Sequence[str], cells: Sequence[Sequence[str]], caption: str = "") -> str:
    """An HTML table with headings `columns` and rows `cells`; all texts are escaped. `caption` stands above it, where given."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _place(row: Row) -> tuple[Any, Any]:
    """The round and the model that a row is about."""
    return row["round"], row.get("model")


def _number_text(value: Any) -> str:
    """A number with four significant digits, anything else as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
