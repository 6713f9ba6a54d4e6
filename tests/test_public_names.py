"""What the package offers, what it costs to import, and the examples in its documentation."""

import ast
import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedtail

HEAVY = ["scipy", "sklearn", "pyarrow", "msgpack", "typer", "rich", "datasets", "flwr_datasets", "PIL", "pandas", "plotly", "jinja2",
         "optuna", "safetensors", "tomli_w", "dp_accounting", "cryptography"]
MODULES = ["fedtail", *(m.name for m in pkgutil.walk_packages(fedtail.__path__, "fedtail."))]


def names_for_type_checkers() -> dict[str, str]:
    """name -> the module it comes from, as written under TYPE_CHECKING."""
    tree = ast.parse(Path(fedtail.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.asname or alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom)
            for alias in node.names}


def imported_after(code: str, *packages: str) -> list[str]:
    """Which packages a fresh interpreter has loaded after running this."""
    probe = f"{code}\nimport sys, json; print(json.dumps([p for p in {list(packages)!r} if p in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_is_what_type_checkers_see():
    assert sorted(fedtail.__all__) == sorted(["__version__", *names_for_type_checkers()])
    assert len(set(fedtail.__all__)) == len(fedtail.__all__)


def test_dir_shows_public_names_and_submodules_and_all_of_them_load():
    submodules = {path.stem for path in Path(fedtail.__file__).parent.iterdir()
                  if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").is_file())}
    assert {"risk", "quantiles", "privacy", "secure", "theory", "cli"} <= submodules
    assert dir(fedtail) == sorted({*fedtail.__all__, *submodules})
    for name in submodules - set(fedtail.__all__):
        assert getattr(fedtail, name) is importlib.import_module(f"fedtail.{name}")


def test_every_name_loads_from_where_type_checkers_look_for_it():
    for name, home in names_for_type_checkers().items():
        value = getattr(fedtail, name)
        assert value is getattr(importlib.import_module(home), name)
        assert value.__name__ == name
        assert value.__doc__      # public things say what they are


def test_star_import_gives_all_of_them():
    scope: dict = {}
    exec("from fedtail import *", scope)
    assert set(fedtail.__all__) <= set(scope)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fedtail' has no attribute 'superquantil'"):
        _ = fedtail.superquantil


@pytest.mark.parametrize("module", MODULES)
def test_modules_offer_only_what_they_hold(module):
    home = importlib.import_module(module)
    missing = [name for name in getattr(home, "__all__", ()) if not hasattr(home, name)]
    assert not missing


def test_import_is_light():
    assert imported_after("import fedtail; fedtail.__version__; dir(fedtail)", "torch", "numpy", *HEAVY) == []


TRAINING_RUN = """
import torch
import fedtail
population = fedtail.Population.from_clients([(torch.randn(6, 3), torch.tensor([0, 1] * 3)) for _ in range(4)])
mlp = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
algorithm = fedtail.Family((fedtail.fedavg(4), fedtail.delta_fl(0.5, 4), fedtail.term(1.0, 4), fedtail.q_ffl(1.0, 4)))
import warnings
warnings.simplefilter("ignore", fedtail.SmallTailWarning)
trained = fedtail.train(algorithm, fedtail.Task(mlp), population, rounds=2)
fedtail.evaluate(trained.modules[1], population).table()
fedtail.evaluate_family(trained, population)
fedtail.finetune(trained.modules[0], population, fedtail.LocalSGD())
for name in fedtail.__all__:
    getattr(fedtail, name)
"""


def test_a_training_run_needs_torch_and_numpy_only():
    assert imported_after(TRAINING_RUN, "torch", "numpy", *HEAVY) == ["torch", "numpy"]


def test_the_examples_in_the_documentation_run():
    results = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert [name for name, result in results.items() if result.failed] == []
    ran = sum(result.attempted for result in results.values())
    assert ran >= 30      # fewer would mean that doctest no longer finds them


def test_every_module_says_what_it_is():
    assert [name for name in MODULES if not importlib.import_module(name).__doc__] == []
