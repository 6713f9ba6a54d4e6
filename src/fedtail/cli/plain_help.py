"""Help texts of commands as plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose help says [required] and [default: ...].

    Typer escapes these brackets where rich is installed, also where the help is printed without it, as "\\[required]".
    """

    def get_help(self, ctx: Any) -> str:
        """The help text of the command in its context `ctx`, without escapes before brackets."""
        return super().get_help(ctx).replace("\\[", "[")
