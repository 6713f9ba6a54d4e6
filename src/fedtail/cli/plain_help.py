"""Help texts of commands as plain text."""

from __future__ import annotations

import click
from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose help says [required] and [default: ...].

    Typer escapes these brackets where rich is installed, also where the help is printed without it, as "\\[required]".
    """

    def get_help(self, ctx: click.Context) -> str:
        """The help text, without escapes before brackets."""
        return super().get_help(ctx).replace("\\[", "[")
