"""Claim: reading an experiment file, and running one without --trust, executes nothing that the file names.

Attacker: whoever sends a file, alone or with a module beside it. Method: a shell command as a part, a function, a loss, a metric, an
encoder and a kind of data, in a class's place and in a nested one; a module beside the file that leaves a mark when it is imported;
one named like an installed package that the user does trust; a name that leads through a trusted module into another; each by show,
by deploy init, and by run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outcome import Outcome

import fedtail

BASE = """\
rounds = 1
[data]
{data}
[task]
{task}
[task.module]
{module}
[sample]
cohort_size = 5
[local]
learning_rate = 0.1
{local}
"""
DATA, MODULE = 'kind = "digits"', 'part = "SoftmaxRegression"\nfeatures = 64\nclasses = 10'
COMMAND = 'cmd = "touch pwned"'
FILES = {
    "channel": BASE.format(data=DATA, task="", module=MODULE, local="") + f'[channel]\npart = "subprocess:getoutput"\n{COMMAND}\n',
    "module": BASE.format(data=DATA, task="", module=f'part = "subprocess:getoutput"\n{COMMAND}', local=""),
    "nested": BASE.format(data=DATA, task="", module=MODULE, local='penalty = { part = "subprocess:getoutput", cmd = "touch pwned" }'),
    "data": BASE.format(data=f'kind = "subprocess:getoutput"\n{COMMAND}', task="", module=MODULE, local=""),
    "ours": BASE.format(data='kind = "fedtail.runs.files:write_atomically"\npath = "pwned"\ncontent = ""', task="", module=MODULE, local=""),
    "loss": BASE.format(data=DATA, task='loss = "marks:loss"', module=MODULE, local=""),
    "metric": BASE.format(data=DATA, task='metrics = [{ name = "a", function = "marks:loss" }]', module=MODULE, local=""),
    "part": BASE.format(data=DATA, task="", module=MODULE, local="") + '[risk]\npart = "marks:Mine"\n',
    "shadow": BASE.format(data=DATA, task="", module=MODULE, local="") + '[risk]\npart = "wave:Mine"\n',      # --trust wave, which is beside
    "through": BASE.format(data=DATA, task="", module='part = "inner.clean:os.system"\ncommand = "touch pwned"', local=""),
}
TRUSTED = {"shadow": ["--trust", "wave"], "through": ["--trust", "./inner"]}
PROBE = "import sys; from fedtail.cli import app; app(sys.argv[1:], standalone_mode=False)"


def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("marks.py", "wave.py"):
            (folder / name).write_text("open('pwned', 'w').close()\n")
        (folder / "inner").mkdir()
        (folder / "inner" / "clean.py").write_text("import os\n")
        for name, text in FILES.items():
            (folder / f"{name}.toml").write_text(text)
        tried, broke = 0, []
        script = "\n".join([
            "import os, sys", "from pathlib import Path", "from typer.testing import CliRunner", "from fedtail.cli import app",
            f"trusted = {TRUSTED!r}",
            f"for name in {list(FILES)!r}:",
            "    for words in (['show'], ['run'], ['deploy', 'init', f'deploy-{name}', '--experiment']):",
            "        more = trusted.get(name, []) if words == ['run'] else []",
            "        done = CliRunner().invoke(app, [*words, f'{name}.toml', *more])",
            "        print(name, words[0], done.exit_code, Path('pwned').exists())",
            "        Path('pwned').unlink(missing_ok=True)"])
        environment = {**os.environ, "PYTHONPATH": str(Path(fedtail.__file__).parents[1]), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            name, command, code, ran = line.split()
            tried += 1
            if ran == "True" or (command == "run" and code == "0"):
                broke.append(f"{command} {name}.toml")
        held = not broke and tried == 3 * len(FILES)
        return Outcome(held, f"{tried} commands on {len(FILES)} files: " + (f"executed by {', '.join(broke)}" if broke else
                                                                           "none executed what they name") + done.stderr[-300:])
