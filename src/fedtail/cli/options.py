"""Options that several commands share."""

from __future__ import annotations

import typer

EXPERIMENT = typer.Argument(..., metavar="EXPERIMENT.toml", show_default=False,
                            help="The experiment file; `fedtail init` writes one.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", show_default=False,
                   help="Change a key of the file: --set risk.tail_fraction=0.3. May be given again.")
OUT = typer.Option(None, "--out", metavar="DIR", help="Where to write; by default a new folder in runs/.", show_default=False)
SEEDS = typer.Option(None, "--seeds", metavar="SEEDS", help="0..4, or 0,1,7; by default those of the file.", show_default=False)
METHOD = typer.Option(None, "--method", metavar="NAME", help="Which of the file's [[method]] entries.", show_default=False)
RESUME = typer.Option(False, "--resume", help="Go on with what is in the folder, from its last checkpoint.")
DEVICE = typer.Option(None, "--device", metavar="DEVICE", help="cpu or cuda; by default that of the file.", show_default=False)
ENGINE = typer.Option(None, "--engine", metavar="ENGINE", help="local or ray; by default that of the file.", show_default=False)
ADDRESS = typer.Option(None, "--address", metavar="HOST:PORT", show_default=False,
                       help="Of the Ray cluster, or auto; by default a Ray is started here.")
TRUST = typer.Option([], "--trust", metavar="FOLDER|PACKAGE", show_default=False,
                     help="Where code of your own that the file names may be imported from: a folder (. is this one), or an "
                          "installed package. May be given again; without it only fedtail's own parts are run.")
MODEL = typer.Option(None, "--model", metavar="NAME", show_default=False,
                     help="Which model of a family, by its name; not needed where there is one.")
BEST = typer.Option(False, "--best", help="The best model, by keep_best of the experiment, in place of the last.")
METRIC = typer.Option(None, "--metric", metavar="NAME", show_default=False,
                      help="Which metric the tables are about: loss, error, or one of the file's; by default all but the loss.")
JSON = typer.Option(False, "--json", help="Print one JSON object instead of tables.")

X = typer.Option(None, "--x", metavar="NAME", help="The array (or columns) of inputs.", show_default=False)
Y = typer.Option(None, "--y", metavar="NAME", help="The array of targets.", show_default=False)
RUN_X = typer.Option(None, "--x", metavar="NAME", show_default=False,
                     help="The array (or columns) of inputs; by default those of the run.")
CLIENT = typer.Option(None, "--client", metavar="NAME", help="The array of client ids.", show_default=False)


def name_or_names(names: list[str] | None) -> str | list[str] | None:
    """The names given with an option as the readers of data take them: one name as a text, several as a list, None for none."""
    return names[0] if names and len(names) == 1 else names or None


def settings_with_device(settings: list[str], device: str | None) -> list[str]:
    """The `--set` settings, KEY=VALUE, with one for `device` appended where it is not None."""
    return settings if device is None else [*settings, f'device="{device}"']


def settings_with_engine(settings: list[str], engine: str | None, address: str | None) -> list[str]:
    """The `--set` settings, KEY=VALUE, with one for `engine` and one for `address` appended, each where it is not None."""
    given = {"kind": engine, "address": address}
    return [*settings, *(f'engine.{name}="{value}"' for name, value in given.items() if value is not None)]


def chosen_seeds(seeds: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The distinct seeds that `--seeds` names ("0..4", with both ends, or "0,1,7"); `default` where it is None.

    Raises ValueError where the text is neither.
    """
    from fedtail.experiment import parse_seeds

    return default if seeds is None else parse_seeds(seeds)
