"""Errors that carry as data which field they are about, so that a reader of files can say where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import Any


class FieldError(ValueError):
    """A field whose value cannot be used: which `field`, what `came`, what is `needed`, what to `write` instead.

    Reads `{field} ({symbol}) must be {needed}, got {came}. {write}`; an error that needs another sentence passes its `text`.
    Whoever reads fields from a file (an experiment, a node's settings) takes the field from here and looks up its line. Where
    the raiser does not know under which name a value was given, `field` is empty and `came` tells.

    >>> error = FieldError("tail_fraction", "in (0, 1]", 80, "For the worst 20% of clients write 0.2.", symbol="theta")
    >>> print(error)
    tail_fraction (theta) must be in (0, 1], got 80. For the worst 20% of clients write 0.2.
    >>> error.field, error.came
    ('tail_fraction', 80)
    """

    def __init__(self, field: str, needed: str = "", came: Any = None, write: str = "", *, symbol: str = "", text: str = ""):
        """Set the message to `text` or, without one, to "`field` (`symbol`) must be `needed`, got `came`. `write`".

        The arguments other than `text` become attributes; `symbol` and `write` may be empty.
        """
        self.field, self.needed, self.came, self.write, self.symbol = field, needed, came, write, symbol
        name = f"{field} ({symbol})" if symbol else field
        sentences = [f"{name} must be {needed}, got {format_value(came)}.", *([write] if write else [])]
        super().__init__(text or " ".join(sentences))

    def __reduce__(self) -> Any:      # workers send errors home as pickles, which call the class with `args`
        """The function and arguments by which pickle rebuilds the error with all its fields, as worker processes send it.

        By default pickle would call the class with the message alone.
        """
        return _rebuild_error, (type(self), self.field, self.needed, self.came, self.write, self.symbol, str(self))


def format_value(value: Any) -> str:
    """A value as an error message shows it: floats with up to six digits, integers in full, anything else by its repr."""
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else repr(value)


def kind_words(value: Any) -> str:
    """A value of an unexpected kind as an error names it: the class X, a text or number as it is, else the name of its type.

    >>> kind_words(FieldError), kind_words("cuda"), kind_words([1])
    ('the class FieldError', "'cuda'", 'list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if value is None or isinstance(value, (str, int, float)) else type(value).__name__


def check_kind(name: str, value: Any, fits: bool, needed: str, write: str) -> None:
    """Raise a TypeError about the argument `name` unless its `value` `fits`, with what is `needed` and what to `write`.

    A class never fits: an instance of it is needed.
    """
    if isinstance(value, type):
        raise TypeError(f"{name} must be {needed}, got {kind_words(value)}. Write {name}={value.__name__}(...).")
    if not fits:
        raise TypeError(f"{name} must be {needed}, got {kind_words(value)}. {write}")


def check_is_number(name: str, value: object) -> None:
    """Raise a TypeError where `value`, of the setting called `name`, is not a real number: text, a tensor or True, say."""
    if isinstance(value, bool) or not isinstance(value, Real):
        written = "it without quotes: 0.5" if isinstance(value, str) else "0.5"
        raise TypeError(f"{name} must be a number, got {value!r}. Write {written}, say.")


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown name: "Did you mean ...?" with the closest of `known`.

    Where none is close it lists all of `known`; where there are none it says "It takes none."
    """
    known = list(known)
    close = get_close_matches(name, known, 1) or get_close_matches(name.lower(), [k.lower() for k in known], 1)
    close = [k for k in known if close and k.lower() == close[0].lower()]
    return f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}." if known else "It takes none."


def _rebuild_error(kind: type[FieldError], field: str, needed: str, came: Any, write: str, symbol: str, text: str) -> FieldError:
    """An error of class `kind` with the attributes `field`, `needed`, `came`, `write` and `symbol`, and the message `text`.

    Pickle calls this when it reads one.
    """
    return kind(field, needed, came, write, symbol=symbol, text=text)
