"""The page of a deployment: what it reads, who may read it, and how it looks in a browser. Names and reasons are hostile texts."""

from __future__ import annotations

import fcntl
import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import chromium
from fedtail.cli import app
from fedtail.deployment.dashboard import DashboardServer
from fedtail.deployment.deployment_state import POINTS, DeploymentState, thinned
from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.membership import add_node, node_names, open_deployment, remove_node
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.rotation import expiries, finish_authority, prepare_authority, rotate_node

NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
FILE = 'rounds = 1\n[task.module]\npart = "SoftmaxRegression"\nfeatures = 5\nclasses = 3\n[sample]\ncohort_size = 4\n[local]\nlearning_rate = 0.1\n'


def write_run(place: Path, rounds: int = 9) -> Path:
    """A run of two nodes as a server leaves it, of which node 1 fails in every round and has a name made to do harm."""
    place.mkdir(parents=True)
    lines = [{"round": r, "question": q, "asked": 12, "answered": 8, "exchanges": 2, "problems": {"1": NASTY}} for r in range(rounds) for q in (0, 1)]
    (place / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "log.txt").write_text("".join(f"2026-11-18T12:00:0{r} round {r + 1} of 20: {r / 10} s, 4 exchanges\n" for r in range(rounds))
                                   + f"2026-11-18T12:00:09 node x is left out: {NASTY} \x1b[2J\n")
    values = {"mean": 0.1, "p90": 0.2, "worst10": 0.3, "clients": 12.0}
    (place / "metrics.jsonl").write_text("".join(json.dumps({"round": r, "members": [{"test": {"error": values}}]}) + "\n" for r in range(rounds)))
    (place / "run.json").write_text(json.dumps({"name": NASTY, "rounds": 20, "members": [NASTY], "rates": True}))
    (place / "privacy.json").write_text(json.dumps({"epsilon": 1.5, "delta": 1e-5}))
    (place / "seconds.json").write_text(json.dumps([0.1] * 30))
    about = {"clients": 8, "minimum": 2, "fedtail": "0.2.0", "budget": NASTY}
    nodes = [{"name": "north", "number": 0, "state": "here", **about}, {"name": NASTY, "number": 1, "state": "away", **about},
             {"name": "gone", "number": 2, "state": "removed"}]
    (place / "nodes.json").write_text(json.dumps({"time": 0.0, "paused": "", "left_out": {"x": NASTY}, "nodes": nodes}))
    return place


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> DeploymentFolder:
    place = tmp_path_factory.mktemp("deployment")
    (place / "e.toml").write_text(FILE)
    folder = write_cell_folder(place / "hospitals", place / "e.toml", ["north", "south"], "127.0.0.1", 8000, minimum=2)
    write_run(folder.path / "runs" / "run")
    return folder


@contextmanager
def served(folder: DeploymentFolder) -> Iterator[int]:
    with DashboardServer(folder) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server.port
        server.stop()
        thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    one = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    one.request(method, path, headers=headers)
    reply = one.getresponse()
    return reply, reply.read()


def test_the_state_is_what_the_files_say(deployment):
    state = DeploymentState(deployment).read()
    run = state["run"]
    assert (state["transport"], state["admitted"], state["runs"]) == ("NVFlare", ["north", "south"], ["run"])
    assert (run["done"], run["rounds"], run["state"]) == (9, 20, "not running")
    assert run["series"][-1] == {"round": 8, "seconds": 0.8, "asked": 12, "answered": 8, "exchanges": 4}
    assert [(one["state"], one["missed"], one["questions"]) for one in run["nodes"][:2]] == [("here", 0, 18), ("away", 18, 18)]
    assert run["problems"] == {"count": 18, "rows": [{"node": NASTY, "why": NASTY, "times": 18, "last": 8}]}
    assert run["evaluations"][0]["series"][0] == {"round": 0, "mean": 0.1, "p90": 0.2, "worst10": 0.3}
    assert run["exchanges"]["count"] == 30
    assert "\x1b" not in "".join(run["log"])
    with (deployment.path / "runs" / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert DeploymentState(deployment).read()["run"]["state"] == "running"


def test_a_state_that_is_read_again_follows_the_files_and_a_long_series_is_thinned(deployment, tmp_path):
    state = DeploymentState(deployment)
    assert state.read()["run"]["done"] == 9
    write_run(deployment.path / "runs" / "later", rounds=3)
    assert state.read()["run"]["name"] == "later"
    assert state.read("run")["run"]["name"] == "run"
    assert state.read("../../etc")["run"]["name"] == "later"
    for path in (deployment.path / "runs" / "later").iterdir():
        path.unlink()
    (deployment.path / "runs" / "later").rmdir()
    series = [{"round": k} for k in range(10_000)]
    assert len(thinned(series)) <= POINTS
    assert thinned(series)[-1] == {"round": 9_999}
    assert DeploymentState(DeploymentFolder(tmp_path)).runs() == {}


def test_only_a_browser_on_this_machine_reads_it_and_nothing_can_be_changed(deployment):
    before = {path: path.read_bytes() for path in deployment.path.rglob("*") if path.is_file()}
    with served(deployment) as port:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:9000"):
            assert ask(port, "/state.json", Host=host)[0].status == 200
        for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "", "[::1]"):      # DNS rebinding
            reply, content = ask(port, "/state.json", Host=host)
            assert (reply.status, b"north" in content) == (403, False)
        assert ask(port, "/state.json", **{"Sec-Fetch-Site": "cross-site"})[0].status == 403
        for path in ("/../server/server.key", "/server.key", "/state.json/", "/runs/run/log.txt", "//etc/passwd", "//[x"):
            assert ask(port, path)[0].status == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert ask(port, "/state.json", method)[0].status == 501
        for path in ("/", "/dashboard.js", "/dashboard.css", "/state.json"):
            reply, _ = ask(port, path)
            policy = reply.headers["Content-Security-Policy"]
            assert reply.status == 200
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert reply.headers["Access-Control-Allow-Origin"] is None
            assert (reply.headers["X-Content-Type-Options"], reply.headers["Cache-Control"]) == ("nosniff", "no-store")
            assert ask(port, path, "HEAD")[1] == b""
    assert {path: path.read_bytes() for path in deployment.path.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_hostile_names_as_text_and_fits(browser, deployment, width):
    with served(deployment) as port:
        context = browser.new_context(viewport={"width": width, "height": 900})
        page, problems, requests = context.new_page(), [], []
        page.set_default_timeout(60_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-read]")
        assert page.title() == "hospitals: 9 of 20"
        assert page.inner_text("#nodes tbody tr:nth-child(2) th") == NASTY
        assert NASTY in page.inner_text("#problems")
        assert NASTY in page.inner_text("#notes")
        assert page.query_selector("main img, main script") is None
        assert "30.0%" in page.inner_text("#evaluations")
        assert page.get_attribute("#track", "aria-valuenow") == "9"
        assert page.query_selector("#evaluations svg path") is not None
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        write_run(deployment.path / "runs" / f"later-{width}", rounds=4)      # the page follows by itself
        page.wait_for_selector("#track[aria-valuenow='4']")
        assert problems == []
        assert all(url.startswith(f"http://127.0.0.1:{port}/") or url == "data:," for url in requests)
        context.close()
    shutil.rmtree(deployment.path / "runs" / f"later-{width}")


def test_nodes_are_added_removed_and_given_new_keys_in_the_folder(tmp_path):
    (tmp_path / "e.toml").write_text(FILE)
    write_cell_folder(tmp_path / "d", tmp_path / "e.toml", ["north", "south"], "127.0.0.1", 8000, minimum=2)
    folder = open_deployment(tmp_path / "d" / "server")
    assert folder.path == tmp_path / "d"
    made = add_node(folder, "west")
    assert 'minimum = 2 ' in (made / "node.toml").read_text()
    assert (made / "server.toml").read_text() == 'host = "127.0.0.1"\nport = 8000\n'
    assert node_names(folder) == ["north", "south", "west"]
    for name, problem in (("west", FileExistsError), ("server", ValueError), ("../x", ValueError)):
        with pytest.raises(problem):
            add_node(folder, name)
    keys = {name: (folder.node_keys / f"{name}.pub").read_bytes() for name in node_names(folder)}
    rotate_node(folder, "west")
    assert (folder.node_keys / "west.pub").read_bytes() == (made / "key.pub").read_bytes() != keys["west"]
    assert (folder.node_keys / "west.crt").read_bytes() == (made / "node.crt").read_bytes()
    assert remove_node(folder, "west") == 2
    assert [one.name for one in folder.node_keys.iterdir() if "west" in one.name] == []
    assert not (made / "key").exists()
    with pytest.raises(ValueError, match=r"there is no node 'west'\. There are north, south"):
        remove_node(folder, "west")
    with pytest.raises(ValueError, match="no new certificates are prepared"):
        finish_authority(folder)
    old = (folder.server_folder / "ca.crt").read_bytes()
    prepare_authority(folder)
    assert (folder.node_folder("north") / "ca.crt").read_bytes().startswith(old)
    assert (folder.server_folder / "ca.crt").read_bytes() == old
    with pytest.raises(FileExistsError, match="Finish that first"):
        prepare_authority(folder)
    finish_authority(folder)
    new = (folder.server_folder / "ca.crt").read_bytes()
    assert new != old
    assert (folder.node_folder("north") / "ca.crt").read_bytes() == new
    assert [round(one.days) for one in expiries(folder)] == [365] * 4
    with pytest.raises(ValueError, match="is no folder of a deployment"):
        open_deployment(tmp_path)


def test_commands_say_what_to_do_next_and_refuse_what_is_unclear(deployment):
    def said(*words):
        return CliRunner().invoke(app, ["deploy", *map(str, words)])

    assert "certificate of the server: until" in said("status", deployment.path).output
    assert json.loads(said("status", deployment.path, "--json").stdout)["run"]["done"] > 0
    for words in ([], ["--node", "north", "--server"], ["--finish"], ["--server", "--finish", "--at-once"]):
        done = said("rotate", deployment.path, *words)
        assert (done.exit_code, "say what to replace" in done.output) == (2, True)
    assert said("remove", deployment.path, "nobody").exit_code == 2
