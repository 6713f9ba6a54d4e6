"""`fedtail reproduce`: the papers' tables and figures, and ours, with a verdict on every claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedtail.cli.options import JSON
from fedtail.cli.terminal import INTERRUPTED, Watcher, exit_with_message, print_errors_as_sentences, print_json

if TYPE_CHECKING:
    from fedtail_studies import Data, Results, Study

COMMITTED = Path(__file__).parents[3] / "experiments"      # committed with the code, beside this package
HERE = Path("reproduced")


@print_errors_as_sentences
def reproduce(
    name: str = typer.Argument(..., metavar="NAME",
                               help="A study; or `list`, to see them all; or `verdicts`, how every claim came out."),
    quick: bool = typer.Option(False, "--quick", help="A smaller version that tests the same claims in minutes."),
    seeds: int | None = typer.Option(None, "--seeds", min=1, metavar="N", help="How many seeds: 0 to N - 1.", show_default=False),
    data: Path | None = typer.Option(None, "--data", metavar="DIR", help="Where the data are, for studies that need some.",
                                     show_default=False),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", help="Where results and page go; by default reproduced/NAME.",
                                    show_default=False),
    device: str = typer.Option("cpu", "--device", metavar="DEVICE", help="cpu or cuda."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", show_default=False,
                                       help="Change the plan: --set visits=347. The page says which plan it was."),
    as_json: bool = JSON,
) -> None:
    """Run a table or figure of the papers.

    It writes a page with our numbers, theirs, and a verdict on every claim.

    Every method and seed is saved as it ends and not run again: the same command goes on where it stopped, and with more
    --seeds adds them.
    """
    from fedtail_studies.catalogue import STUDIES, study_called
    from fedtail_studies.plans import with_settings
    from fedtail_studies.running import command_of

    if name == "list":
        show_list(STUDIES, as_json)
        return
    if name == "verdicts":
        from fedtail_studies.overview import overview

        typer.echo(overview(STUDIES, out or COMMITTED), nl=False)
        return
    study = study_called(name)
    plan = study.quick if quick else study.full
    plan = with_settings(plan if seeds is None else replace(plan, seeds=seeds), settings)
    folder = out or HERE / (f"{study.name}-quick" if quick else study.name)
    _check_device(device)
    command = command_of(study, plan, quick, device, settings)
    results = _run(study, plan, folder, data, quick, device, command, as_json)
    show_verdicts(study, results, folder, as_json)


def _run(study: Study, plan: Any, folder: Path, data: Path | None, quick: bool, device: str, command: str,
         quiet: bool) -> Results:
    from fedtail_studies import Stopped
    from fedtail_studies import reproduce as run_study

    read = _data(study, plan, folder, data, quick)
    with Watcher(quiet=quiet).show_progress() as watcher:
        try:
            return run_study(study, plan, folder, read, quick, device, watcher, command)
        except Stopped:
            exit_with_message(f"stopped; what is finished is saved in {folder}. The same command goes on.", INTERRUPTED)
    raise AssertionError


def _data(study: Study, plan: Any, folder: Path, place: Path | None, quick: bool) -> Data | None:
    """The data, read; nothing where none are needed, or where all that is left to do is the page."""
    from fedtail_studies.running import begun, cells_left

    if study.data is None:
        if place is not None:
            raise ValueError(f"--data {place} was given, but {study.name} makes its own data. Leave it out.")
        return None
    if place is not None:
        if not place.exists():
            raise FileNotFoundError(f"there is nothing at --data {place}. {study.data.advice}")
        return study.data.read(place)
    if cells_left(study, plan, begun(study, plan, folder, None, quick)):
        raise ValueError(f"{study.name} needs {study.data.name}. {study.data.advice}")
    return None


def _check_device(device: str) -> None:
    import torch

    if not device.startswith("cuda") and device != "cpu":
        raise ValueError(f"--device must be cpu or cuda, got {device!r}.")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: PyTorch sees no GPU here. Leave it out to use the processor.")


def show_list(studies: tuple[Study, ...], as_json: bool) -> None:
    from fedtail.cli.terminal import show_table

    if as_json:
        print_json({"studies": [{"name": s.name, "paper": s.paper, "item": s.item, "title": s.title, "rounds": s.cost.rounds,
                                 "minutes": s.cost.minutes, "gpu_minutes": s.cost.gpu_minutes,
                                 "data": s.data.name if s.data else None, "state": state(s)} for s in studies]})
        return
    cells = [[s.name, s.source.strip("[]"), s.data.name if s.data else "its own", str(s.cost.rounds or "none"),
              f"{s.cost.minutes:g}", "no use" if s.cost.gpu_minutes is None else f"{s.cost.gpu_minutes:g}", state(s)]
             for s in studies]
    show_table("Tables and figures of the papers, and questions of ours; minutes for a full run on two cores, and on a GPU",
               ["name", "item", "data", "rounds", "minutes", "GPU", "state"], cells)


def state(study: Study) -> str:
    """Whether there are results: committed with the code, made here, none yet."""
    from fedtail_studies.results import FILE

    if (COMMITTED / study.name / FILE).exists():
        return "committed"
    if (HERE / study.name / FILE).exists():
        return "run here" if (HERE / study.name / "README.md").exists() else "begun here"
    return "needs data" if study.data else "not run"


def show_verdicts(study: Study, results: Results, folder: Path, as_json: bool) -> None:
    from fedtail_studies.page import judged

    found = judged(study, results)
    if as_json:
        print_json({"study": study.name, "data": results.data, "seeds": list(results.seeds), "claims": found,
                    "folder": str(folder)})
        return
    width = max([20, *(len(claim["verdict"]) for claim in found)])
    for claim in found:
        typer.echo(f"{claim['verdict']:>{width}}  {claim['claim']} {claim['source']}\n{'':>{width + 2}}{claim['reason']}")
    typer.echo(f"The page:  {folder / 'README.md'}")
