"""Text that came from another machine, made fit for a log or a terminal: one line, no escapes, bounded in length."""

from __future__ import annotations

MOST = 2000      # characters of one line


def one_line(text: object, most: int = MOST) -> str:
    r"""`text` as one line of printable characters, cut to about `most` of them in the middle.

    A line break, a tab, a terminal's escape, a character that changes the direction of writing or is not printable for another
    reason is replaced by its escape as Python writes it.

    >>> one_line("north\n2026-01-01 round 9 of 9\x1b[2J")
    'north\\n2026-01-01 round 9 of 9\\x1b[2J'
    """
    text = str(text)
    text = text if len(text) <= most else f"{text[:most // 2]} ... {text[-most // 3:]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def escaped_lines(text: str) -> str:
    r"""`text`, which may have several lines, each as by `one_line`; all but the first are indented by two spaces.

    So a traceback can be read in a log, and no line of it, whatever an error's text holds, looks like a line of that log.

    >>> print(escaped_lines("ValueError: no\n2026-01-01 round 9 of 9\x1b[2J"))
    ValueError: no
      2026-01-01 round 9 of 9\x1b[2J
    """
    return "\n  ".join(map(one_line, text.rstrip("\n").split("\n")))
