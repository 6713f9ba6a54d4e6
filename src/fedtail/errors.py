"""Errors that carry as data which field they are about, so that a reader of files can say where it stands."""

from __future__ import annotations

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


def _rebuild_error(kind: type[FieldError], field: str, needed: str, came: Any, write: str, symbol: str, text: str) -> FieldError:
    """An error of class `kind` with the attributes `field`, `needed`, `came`, `write` and `symbol`, and the message `text`.

    Pickle calls this when it reads one.
    """
    return kind(field, needed, came, write, symbol=symbol, text=text)
