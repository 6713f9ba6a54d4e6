"""A study's page in Markdown, made of its results and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtail.runs.files import write_atomically
from fedtail_studies.results import Results
from fedtail_studies.study import Claim, Finding, Study, Verdict

PAGE = "README.md"


def judged(study: Study, results: Results) -> list[dict[str, Any]]:
    """Every claim with its verdict; nothing before a seed is complete."""
    if not results.seeds:
        return []
    return [{"claim": claim.text, "source": claim.source, "verdict": str(finding.verdict), "reason": finding.reason}
            for claim in study.claims for finding in (_judge(claim, results),)]


def _judge(claim: Claim, results: Results) -> Finding:
    """On other data than the paper's a direction is the most that can agree."""
    finding = claim.judge(results)
    other = finding.verdict in (Verdict.AGREES, Verdict.WITHIN_ERROR) and not results.papers_data
    return finding._replace(verdict=Verdict.DIRECTION) if other else finding


def write_page(study: Study, results: Results, folder: Path) -> None:
    """README.md and its figures."""
    if results.seeds:
        write_atomically(folder / PAGE, page(study, results, _draw(study, results, folder)))


def page(study: Study, results: Results, figures: list[str]) -> str:
    """The text of README.md."""
    parts = [f"# {_title(study, results)}", _how(study, results), _verdicts(study, results), *_tables(study, results), *figures]
    notes = study.notes(results)
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in notes))
    return "\n\n".join([*parts, _made(results)]) + "\n"


def _title(study: Study, results: Results) -> str:
    quick = ", quick version" if results.quick else ""
    where = f": {results.data['name']}" if results.data else ""
    return f"{study.title}{where}{quick}"


def _how(study: Study, results: Results) -> str:
    seeds = "one seed" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds, ± is the standard deviation over them"
    lines = [f"After {study.source}; {seeds}. References as in `docs/references.md`." if study.paper
             else f"A question of ours: {study.item}; {seeds}."]
    if not results.papers_data and results.data:
        about = f"{results.data['about']} " if results.data["about"] else ""
        lines.append(f"These are not the paper's data. {about}Directions are compared, values are not.")
    return "\n".join(lines) + f"\n\n    {results.runs[-1]['command']}"


def _verdicts(study: Study, results: Results) -> str:
    rows = [f"| {found['claim']} {found['source']} | **{found['verdict']}** | {found['reason']} |"
            for found in judged(study, results)]
    return "\n".join(["## Claims", "", "| claim | verdict | why |", "|---|---|---|", *rows])


def _tables(study: Study, results: Results) -> list[str]:
    return [f"## {table.title}\n\n" + (f"Printed: {table.source}.\n\n" if table.source else "")
            + table.markdown(results.papers_data) for table in study.tables(results)]


def _draw(study: Study, results: Results, folder: Path) -> list[str]:
    """The figures, where matplotlib is installed; else a line that says how to get them."""
    if study.figures is None:
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return ["Figures need matplotlib: `pip install matplotlib`, then the same command."]
    return [f"![{Path(figure.file).stem}]({figure.file})\n\n{figure.caption}" for figure in study.figures(results, folder)]


def _made(results: Results) -> str:
    lines = ["## Made by", ""]
    for run in results.runs:
        machine, versions = run["machine"], ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        gpu = f", {machine['gpu']}" if "gpu" in machine else ""
        lines.append(f"- `{run['command']}` on {run['date']}: {machine['processor']}, {machine['cores']} cores{gpu}; {versions}")
    plan = ", ".join(f"{name} {value}" for name, value in results.plan.items())
    return "\n".join([*lines, f"- {results.seconds / 60:.1f} minutes of work; plan: {plan}", "",
                      "All numbers are in `results.json`; the page is made of them by the same command, which runs nothing "
                      "twice."])
