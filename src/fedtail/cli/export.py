"""`fedtail export`: the model of a finished run as files that other programs run, with a model card."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtail.cli import options
from fedtail.cli.terminal import print_errors_as_sentences, print_json, show_alarms


@print_errors_as_sentences
def export(
    run: Path = typer.Argument(..., metavar="RUN", help="The run folder.", show_default=False),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", show_default=False,
                                    help="A new folder; by default export in the run's own."),
    formats: list[str] = typer.Option([], "--format", metavar="FORMAT", show_default=False,
                                      help="safetensors, torch (torch.export) or onnx; by default all that can be written here. "
                                           "May be given again."),
    model: str | None = options.MODEL,
    best: bool = options.BEST,
    licence: str | None = typer.Option(None, "--licence", metavar="NAME", show_default=False,
                                       help="For the model card: an identifier such as apache-2.0."),
    trust: list[str] = options.TRUST,
    as_json: bool = options.JSON,
) -> None:
    """Write the model of a finished run to a folder: safetensors with its settings, torch.export, ONNX, and a model card.

    Every file that can be run is run after it was written, and must give the outputs of the model. README.md is a model card in
    the format of the Hugging Face Hub: data, method, privacy statement, statistics of the tail, limits.
    """
    from fedtail.runs.diverged import divergence_sentences
    from fedtail.runs.exporting import export_run
    from fedtail.runs.models_of_run import finished_run

    found = finished_run(run)
    written = export_run(found, out or found.path / "export", formats, model, best, licence, trust)
    if as_json:
        print_json(written)
        return
    for name, text in written["files"].items():
        typer.echo(f"{name}: {text}")
    for name, why in written["left_out"].items():
        typer.echo(f"{name} is left out: {why}")
    typer.echo(f"Wrote {written['folder']}.")
    show_alarms([] if best else divergence_sentences([found]))
