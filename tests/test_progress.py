"""What a server and a node say while they run: rounds a line a second, what is slow or refused, and nothing that forges a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from fedtail.deployment.audit_log import AuditLog
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.deployment_state import DeploymentState
from fedtail.deployment.flower.folder import DeploymentFolder
from fedtail.deployment.progress import NodeNews, RunNews, SeldomSaid, followed, node_follower, run_follower
from fedtail.runs.recording import append_to_log
from test_deploying import FILE, TAIL

from remote_cases import Sites

NOW = "2026-11-19T12:00:00"


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def round_line(number: int, of: int = 9) -> str:
    return f"{NOW} round {number} of {of}: 0.1 s, 4 exchanges, 3 of 3 nodes answered"


def test_rounds_are_told_once_a_second_and_the_last_one_always():
    clock = Clock()
    news, told = RunNews(SeldomSaid(1.0, clock)), []
    for number in range(1, 10):
        told += news.lines(round_line(number))
        clock.now += 0.3
    assert told == [round_line(number) for number in (1, 5, 9)]


def test_of_exchanges_the_slow_are_told_and_of_a_traceback_its_end():
    news = RunNews()
    said = [f"{NOW} node-1 has joined, with 8 clients", f"{NOW} paused: 1 nodes are left", f"{NOW} exchange 7: 3 messages, 3 replies, 9.2 s"]
    unsaid = [f"{NOW} exchange 8: 3 messages, 3 replies, 0.31 s", "    File \"a.py\", line 3, in f"]
    assert [text for line in said + unsaid for text in news.lines(line)] == said
    assert list(news.lines(f"{NOW} Traceback (most recent call last):")) == [f"{NOW} ended by an error:"]
    assert list(news.lines("  ValueError: no")) == ["  ValueError: no"]


def entries(*about: dict[str, object]) -> list[str]:
    return [json.dumps({"time": "2026-11-19T12:00:00+00:00", **one}) for one in about]


def test_a_node_says_each_round_in_a_line_and_what_it_refused():
    clock = Clock()
    news = NodeNews(SeldomSaid(1.0, clock))

    def told(*about: dict[str, object]) -> list[str]:
        return [text.split(" ", 1)[1] for line in entries(*about) for text in news.lines(line)]

    answered = {"what": "answered", "round": 0}
    assert told({"what": "info sent"}) == ["the server asked who this node is, and was told"]
    assert told({"what": "opened", "round": 0}, answered, {"what": "charged"}, answered, {"what": "closed", "round": 0, "finished": True}) == [
        "round 1 is over: 2 questions answered"]
    assert told({"what": "opened", "round": 1}, answered, {"what": "closed", "round": 1, "finished": True}) == []      # in the same second
    assert told({"what": "opened", "round": 2}, answered, {"what": "closed", "round": 2, "finished": False}) == [
        "round 3 is over: 1 questions answered, and the round was lost"]
    assert told({"what": "refused", "why": "no"}, {"what": "refused", "why": "not this\n either"}) == []
    clock.now = 2.0
    assert told({"what": "refused", "why": "the budget is spent"}) == ["refused: the budget is spent (and 2 before it)"]
    assert list(news.lines("rubbish")) == list(news.lines("[1]")) == []


def test_what_is_appended_is_read_once_in_whole_lines_and_new_files_from_their_beginning(tmp_path):
    said: list[str] = []
    append_to_log(tmp_path / "old", "started long ago")
    follower = run_follower(tmp_path, say=said.append)
    follower.look()
    assert said == []
    append_to_log(tmp_path / "old", "goes on")
    append_to_log(tmp_path / "new", "started")
    with (tmp_path / "new" / "log.txt").open("a") as file:
        file.write("half a li")
    follower.look()
    follower.look()
    assert sorted(text.split(" ", 1)[1] for text in said) == ["goes on", "started"]
    with (tmp_path / "new" / "log.txt").open("a") as file:
        file.write("ne\n")
    follower.look()
    assert said[2:] == ["half a line"]
    (tmp_path / "new" / "log.txt").write_text("anew\n")      # another run began in this folder
    follower.look()
    assert said[3:] == ["anew"]


def test_a_thread_says_what_a_nodes_audit_log_holds_and_the_rest_at_the_end(tmp_path):
    said: list[str] = []
    log = AuditLog(tmp_path / "audit.jsonl")
    with followed(node_follower(log.path, said.append)):
        log.write("info sent")
        until = time.monotonic() + 60
        while not said and time.monotonic() < until:
            time.sleep(0.01)
        assert len(said) == 1
        log.write("refused", why="no")
    assert len(said) == 2
    assert said[1].endswith("refused: no")


def test_the_log_of_a_run_says_how_many_nodes_answered_and_the_state_reads_it(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(FILE + TAIL)
    out = tmp_path / "runs" / "run"
    DeployedRun(deployed_experiment(path), 0, out).run(Sites(vanish={3: range(9, 13)}).fleet())
    lines = [line for line in (out / "log.txt").read_text().splitlines() if " round " in line and "exchanges" in line]
    without = {one["round"] for one in map(json.loads, (out / "answers.jsonl").read_text().splitlines()) if one["answered"] < one["asked"]}
    assert 0 < len(without) < 4
    assert [line.split(", ")[2] for line in lines] == [f"{4 if round in without else 5} of 5 nodes answered" for round in range(4)]
    assert all(one["seconds"] is not None for one in DeploymentState(DeploymentFolder(tmp_path))._run("run", out)["series"])


def test_a_line_is_said_escaped_and_at_once(tmp_path):
    program = ("import os, time\nfrom fedtail.deployment.progress import say_now\n"
               "say_now('north\\n2026-11-19 round 9 of 9\\x1b[2J')\nos._exit(0)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    (line,) = done.stderr.splitlines()
    assert line.split(" ", 1)[1] == "north\\n2026-11-19 round 9 of 9\\x1b[2J"


