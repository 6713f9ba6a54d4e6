"""All studies of a folder on one page: how each claim came out, those that disagree in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtail_studies.page import PAGE
from fedtail_studies.results import FILE
from fedtail_studies.study import Study, Verdict

HEAD = ("# What came out", "",
        "How many claims our results support, as `fedtail reproduce verdicts` prints it. On other data than the paper's,",
        "\"agrees in direction\" is the best a claim can get.", "")
COLUMNS = (Verdict.AGREES, Verdict.WITHIN_ERROR, Verdict.DIRECTION, Verdict.DISAGREES, Verdict.NOT_TESTABLE)


def overview(studies: Sequence[Study], folder: Path) -> str:
    """In Markdown, from the results that lie in the folder and nothing else."""
    there = [(study, json.loads((folder / study.name / FILE).read_text())) for study in studies
             if (folder / study.name / FILE).exists() and (folder / study.name / PAGE).exists()]
    if not there:
        raise FileNotFoundError(f"there are no results of studies in {folder}. Run one with `fedtail reproduce NAME`, then write "
                                "`fedtail reproduce verdicts --out reproduced`.")
    head = ["study", "of", "on", "seeds", *COLUMNS]
    rows = [[f"[{study.name}]({study.name}/{PAGE})", study.source, found["data"]["name"] if found["data"] else "its own data",
             str(len(found["cells"])), *(str(_count(found)[verdict] or "") for verdict in COLUMNS)]
            for study, found in there]
    total = sum((_count(found) for _, found in there), Counter())
    rows.append(["**all**", "", "", "", *(str(total[verdict]) for verdict in COLUMNS)])
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    against = [f"- **{study.name}**: {claim['claim']} {claim['source']} {claim['reason']}."
               for study, found in there for claim in found["claims"] if claim["verdict"] == Verdict.DISAGREES]
    return "\n".join([*HEAD, *lines, "", "## Where we disagree", "", *(against or ["Nowhere."])]) + "\n"


def _count(found: dict[str, Any]) -> Counter[str]:
    return Counter(claim["verdict"] for claim in found["claims"])
