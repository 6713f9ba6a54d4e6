"""The model of a run as files that other programs run: safetensors, torch.export, ONNX; each is run again before it counts."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtail.errors import nearest_hint
from fedtail.experiment.source import Trusted
from fedtail.model_file import ENTRY, model_bytes
from fedtail.modules import call_module, cast_inputs
from fedtail.reading import read_json
from fedtail.runs.files import RunError, refuse_foreign_folder, write_atomically, write_json
from fedtail.runs.model_card import model_card
from fedtail.runs.models_of_run import load_models, member_index, model_files
from fedtail.runs.run_folder import RunFolder
from fedtail.types import Examples

FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
CONFIG, CARD = "config.json", "README.md"
TRACED, TRIED = 3, (1, 7)           # examples in the batch that an export sees, and in those that it is checked with
CLOSE = 1e-4                        # outputs of an exported file may differ by this, relative to the largest


def export_run(run: RunFolder, folder: Path, formats: Sequence[str] = (), model: int | str | None = None, best: bool = False,
               licence: str | None = None, trust: Trusted = ()) -> dict[str, Any]:
    """Write a model of a finished run to `folder`, with its settings (`config.json`) and a model card (`README.md`).

    `formats` are "safetensors", "torch" (torch.export) and "onnx"; by default all that can be written with the packages here, and
    what cannot is listed with the reason. The files of "torch" and "onnx" are read again and run on batches of other sizes, and
    must give the outputs of the model. `model` names one of a family, `best` the one that `keep_best` kept; `licence` goes into
    the card. The user's own module is imported only from the folders and packages in `trust`.

    Returns a dict: `folder`, `files`, a sentence for each by name, and `left_out`, by format. Raises ValueError for an unknown or
    missing format or model, RunRefused for a folder with other files, RunError where an exported file gives other outputs.
    """
    _check_formats(formats)
    refuse_foreign_folder(folder, {CONFIG})
    index = member_index(run, model)
    module, inputs = load_models(run, trust, best)[1][index], example_inputs(run, TRACED)
    folder.mkdir(parents=True, exist_ok=True)
    written, left_out = {}, {}
    for kind in formats or FILES:
        try:
            written[FILES[kind]] = _WRITERS[kind](module, inputs, folder / FILES[kind], run, model_files(run, best)[index])
        except NotExported as reason:
            if formats:
                raise ValueError(f"{kind} cannot be written: {reason}") from reason
            left_out[kind] = str(reason)
    write_json(folder / CONFIG, _config(run, index, best))
    write_atomically(folder / CARD, model_card(run, index, best, list(written), licence))
    written |= {CONFIG: "how the module is made, and the shape of its inputs", CARD: "the model card"}
    return {"folder": str(folder), "files": written, "left_out": left_out}


class NotExported(Exception):
    """A format that cannot be written here, or for this module; the message says why."""


def example_inputs(run: RunFolder, count: int, seed: int = 0) -> Examples:
    """Inputs of `count` examples as the run's model takes them, made up by their shapes in `run.json`: no client's data.

    Floating-point numbers are normal, integers are ones, which every vocabulary has. Runs that do not hold the shapes (of earlier
    versions, and deployed ones) raise ValueError.
    """
    shapes = run.about.get("inputs")
    if not shapes:
        raise ValueError(f"run.json of {run.path} does not say which inputs its model takes: runs of earlier versions and "
                         "deployed ones do not. Export the module by hand: RunFolder.open(...).module().")
    generator = torch.Generator().manual_seed(seed)
    made = {name: _made_up(torch.Size([count, *one["shape"]]), getattr(torch, one["dtype"]), generator)
            for name, one in shapes.items()}
    return made["x"] if list(made) == ["x"] else made


def _made_up(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers of a floating-point type, ones of any other."""
    return torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def _check_formats(formats: Sequence[str]) -> None:
    """Raise ValueError, with the nearest that there is, for an unknown format."""
    for one in formats:
        if one not in FILES:
            raise ValueError(f"there is no format {one!r}. {nearest_hint(one, list(FILES))}")


def _write_safetensors(module: nn.Module, inputs: Examples, place: Path, run: RunFolder, source: Path) -> str:
    """Write the module's tensors, with what the file of the run, `source`, says of their training; returns a sentence."""
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        made = json.loads((file.metadata() or {}).get(ENTRY, "null"))
    write_atomically(place, model_bytes(module, made))
    return f"{sum(t.numel() for t in module.state_dict().values())} numbers by name"


def _write_torch(module: nn.Module, inputs: Examples, place: Path, run: RunFolder, source: Path) -> str:
    """Write the module by torch.export, for batches of any size; returns a sentence. `source` is not used."""
    inputs, sizes = cast_inputs(inputs, _dtype(module)), torch.export.Dim("examples", min=1)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    shapes = {name: {0: sizes} for name in inputs} if isinstance(inputs, dict) else ({0: sizes},)
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(torch.export.export(module, args, kwargs, dynamic_shapes=shapes), place)
    except Exception as reason:      # whatever the tracer says of a user's module
        raise NotExported(f"torch.export does not take this module ({_first_line(reason)})") from reason
    loaded = torch.export.load(place).module()
    return _checked(place, module, run, lambda batch: call_module(loaded, batch))


def _write_onnx(module: nn.Module, inputs: Examples, place: Path, run: RunFolder, source: Path) -> str:
    """Write the module as ONNX by torch's exporter, for batches of any size; returns a sentence. `source` is not used."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise NotExported(f"torch's exporter needs {' and '.join(missing)}. Write pip install 'fedtail[onnx]'")
    inputs = cast_inputs(inputs, _dtype(module))
    names = list(inputs) if isinstance(inputs, dict) else ["x"]
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), None)
    sizes = torch.export.Dim("examples", min=1)
    shapes = {name: {0: sizes} for name in names} if isinstance(inputs, dict) else ({0: sizes},)
    try:
        with warnings.catch_warnings(action="ignore"), _quiet_exporter():
            torch.onnx.export(module, args, str(place), kwargs=kwargs, input_names=names, output_names=["outputs"],
                              dynamic_shapes=shapes, dynamo=True, verbose=False, external_data=False)
    except Exception as reason:      # whatever the tracer says of a user's module
        raise NotExported(f"torch.onnx does not take this module ({_first_line(reason)})") from reason
    if find_spec("onnxruntime") is None:
        return "ONNX, not run again: onnxruntime is not installed"
    import onnxruntime

    session = onnxruntime.InferenceSession(str(place), providers=["CPUExecutionProvider"])

    def run_session(batch: Examples) -> Tensor:
        """The outputs of the file for a batch."""
        given = batch if isinstance(batch, dict) else {"x": batch}
        wanted = {one.name for one in session.get_inputs()}      # an input that the module does not use is not in the file
        return torch.from_numpy(session.run(None, {name: t.numpy() for name, t in given.items() if name in wanted})[0])

    return _checked(place, module, run, run_session)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """A context in which the ONNX exporter logs no warnings, such as that torchvision, which nobody asked for, is not there."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _checked(place: Path, module: nn.Module, run: RunFolder, call: Callable[[Examples], Tensor]) -> str:
    """Run an exported file, by `call`, on batches of other sizes than it was traced with; returns how far it is from the module.

    Raises RunError, and removes the file, where that is more than rounding.
    """
    worst = 0.0
    for count in TRIED:
        batch = cast_inputs(example_inputs(run, count, seed=count), _dtype(module))
        with torch.no_grad():
            ours, theirs = call_module(module, batch), call(batch)
        gap = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("inf")
        worst = max(worst, gap / (1 + float(ours.abs().max())))
    if not worst <= CLOSE:
        place.unlink()
        raise RunError(f"{place.name} gives outputs that differ by {worst:.3g} from those of the model, so it was removed. Leave "
                       "this format out with --format.")
    return f"read and run again; outputs differ by at most {worst:.1e}"


_WRITERS: dict[str, Callable[[nn.Module, Examples, Path, RunFolder, Path], str]] = {
    "safetensors": _write_safetensors, "torch": _write_torch, "onnx": _write_onnx}


def _config(run: RunFolder, index: int, best: bool) -> dict[str, Any]:
    """What `config.json` holds: how the module is made, its inputs, and which run and model it is from."""
    task = run.about["experiment"].get("task", {})
    return {"library_name": "fedtail", "fedtail_version": run.about["versions"]["fedtail"], "module": task.get("module"),
            "dtype": task.get("dtype"), "inputs": run.about.get("inputs"), "classes": bool(run.about.get("rates")),
            "columns": run.about.get("columns"), "class_names": run.about.get("classes"),
            "method": run.members[index], "seed": run.seed, "rounds": read_json(run.path / "result.json")["round"], "best": best}


def _dtype(module: nn.Module) -> torch.dtype:
    """The type of the module's floating-point parameters."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _first_line(reason: Exception) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)[:200]
