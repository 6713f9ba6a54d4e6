"""The table of all audits in docs, between two marks, written by the command that ran them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from audits.catalogue import AUDITS
from audits.findings import Finding

BEGIN, END = "<!-- written by make audits -->", "<!-- end of what make audits wrote -->"
HEAD = ("| audit | release | setting | ε claimed | ε at least | ratio | damage | ε at least, damaged | by | observations |",
        "|---|---|---|---|---|---|---|---|---|---|")


def write_page(path: Path, findings: Sequence[Finding]) -> None:
    """Put a row for each finding into the table of a page; rows of other audits stay, those of audits that are gone do not."""
    before, rest = path.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    rows |= {one.audit.name: row(one) for one in findings}
    written = [rows[audit.name] for audit in AUDITS if audit.name in rows]
    path.write_text("\n".join((f"{before}{BEGIN}", *HEAD, *written, f"{END}{after}")))


def row(finding: Finding) -> str:
    """A row of the table, in Markdown."""
    audit, damage = finding.audit, finding.damage if finding.caught else f"{finding.damage}, **not caught**"
    return (f"| `{audit.name}` | {audit.release} | {audit.setting} | {finding.claimed:.2f} | {finding.proven:.2f} | {finding.ratio:.2f} | {damage} | "
            f"{finding.proven_damaged:.2f} | {audit.method} | 2 x {finding.observations:,} |")
