"""What a node says forges no line: not of a run's log, not of a terminal, wherever its texts are written or printed."""

from __future__ import annotations

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from fedtail.cli import app
from fedtail.cli.terminal import print_errors_as_sentences
from fedtail.deployment.deployed_experiment import deployed_experiment
from fedtail.deployment.deployed_run import DeployedRun
from fedtail.deployment.deployment_state import DeploymentState, status_lines
from fedtail.deployment.launch import Attendance
from fedtail.deployment.node_messages import Reply, encode_message, message_digest, read_reply
from fedtail.deployment.node_status import compare_logs, entry_text
from fedtail.deployment.nodes import Nodes
from fedtail.deployment.nvflare.folder import write_cell_folder
from fedtail.deployment.registry import NodeInfo
from fedtail.deployment.signed_info import read_node_keys, read_request, sign_info
from fedtail.escaping import escaped_lines, one_line
from fedtail.runs.recording import append_to_log
from fedtail.wire import pack
from test_deploying import FILE, TAIL

from remote_cases import PEOPLE, Sites

FORGED = "2026-11-18T12:00:00 round 4 of 4: 0.0 s, 4 exchanges"
EVIL = f"no\n{FORGED}\r\x1b[2J\x1b]0;owned\x07\u202e\u2028{FORGED}\x85{FORGED}\x9b2J"
SENSELESS = {"\n", "\t"}      # what this library's own lines and tables may hold


def fits(text: str) -> bool:
    """Whether a text has no line that EVIL made, by any reader's idea of a line, and nothing that a terminal obeys."""
    return all(one.isprintable() or one in SENSELESS for one in text) and FORGED not in [line.strip() for line in text.splitlines()]


@pytest.fixture
def deployment(tmp_path):
    (tmp_path / "e.toml").write_text(FILE + TAIL)
    return write_cell_folder(tmp_path / "hospitals", tmp_path / "e.toml", ["north", "south"], "127.0.0.1", 8000, minimum=2)


def say(at):
    """A fault: the node `at`, or every node for None, says EVIL instead of an answer."""
    def fault(now, node, letter, answer):
        return encode_message(Reply(message_digest(letter), problem=EVIL.encode())) if at in (node, None) else answer
    return fault


@pytest.mark.filterwarnings("always::fedtail.algorithm.RoundLostWarning")
@pytest.mark.parametrize("channel", ["SecureChannel", "IntegerChannel"])
@pytest.mark.parametrize("at", [2, None], ids=["one node", "all nodes"])
def test_the_problem_that_a_node_reports_is_one_line_wherever_it_is_shown(deployment, at, channel):
    threshold = "threshold = 8" if channel == "SecureChannel" else ""
    text = f'{FILE.partition("[channel]")[0]}[channel]\npart = "{channel}"\n{threshold}\n{TAIL}'
    (deployment.path / "experiment.toml").write_text(text)
    out = deployment.path / "runs" / "run"
    fleet = Sites(fault=say(at)).fleet()
    DeployedRun(deployed_experiment(deployment.path / "experiment.toml"), 0, out).run(fleet)
    log = (out / "log.txt").read_text()
    assert fits(log)
    assert ("is lost" in log) is (at is None)
    assert sum(line[20:].startswith("round 4 of 4: ") for line in log.split("\n")) == 1
    problems = [why for line in (out / "answers.jsonl").read_text().splitlines() for why in json.loads(line)["problems"].values()]
    assert any("\\x1b[2J" in why for why in problems)
    assert all(map(fits, problems))
    state = DeploymentState(deployment).read()
    assert state["run"]["done"] == 4
    assert all(map(fits, [*status_lines(state), *state["run"]["log"], *(row["why"] for row in state["run"]["problems"]["rows"])]))
    told = CliRunner().invoke(app, ["deploy", "log", str(out)])
    assert "\\x1b[2J" in told.output
    assert fits(told.output)


def test_what_a_node_says_of_itself_is_one_line_in_the_log_the_status_and_the_dashboard(deployment):
    """Its version, its budget, and names that are not its own; it signs what it says, so that it may say anything."""
    out, log = deployment.path / "runs" / "run", []
    key = deployment.node_folder("north") / "key"

    class Wire:
        ids, seconds = {}, []

        def online_nodes(self):
            return {1, 2}

        def request_node_info(self, nodes, request):
            info = {1: NodeInfo("north", PEOPLE.key, PEOPLE.mass, None, 2, EVIL[:90], (), EVIL),
                    2: NodeInfo(EVIL, PEOPLE.key, PEOPLE.mass)}
            return {one: sign_info(pack(info[one]), read_request(request).challenge, key) for one in nodes}

    nodes = Nodes(Wire(), log.append, partial(read_node_keys, deployment.node_keys))
    nodes.wait_for_nodes(1, 0.0)
    assert nodes.names == ["north"]
    run = DeployedRun(deployed_experiment(deployment.path / "experiment.toml"), 0, out)
    run.log("started")
    Attendance(run, nodes, Sites().fleet())
    state = DeploymentState(deployment).read()
    (node,) = state["run"]["nodes"]
    assert "\\x1b[2J" in node["budget"]
    assert "\\x1b[2J" in state["run"]["left_out"]["2"]
    shown = list(status_lines(state))
    assert sum("\\x1b[2J" in line for line in shown) == 2
    assert all(map(fits, [*log, *shown, node["budget"], node["fedtail"], *state["run"]["left_out"].values()]))
    with pytest.raises(RuntimeError) as found:
        nodes.wait_for_nodes(2, 0.0)
    assert fits(str(found.value))


def test_the_log_of_a_node_that_is_given_to_the_server_may_hold_anything():
    asked = {"what": "asked", "context": "a" * 64, "training": EVIL, "round": 1}
    theirs = [{"what": "answered", "training": EVIL, "context": EVIL, "round": EVIL, "time": EVIL}, {"what": "answered", "training": EVIL},
              {"what": "answered"}, {"what": "answered", "training": EVIL, "context": {EVIL: 1}, "{0}": 1}]
    found = compare_logs([asked], theirs)
    assert len(found) == 3
    assert all(map(fits, [*found, *map(entry_text, theirs)]))


def test_an_error_that_a_command_prints_obeys_nothing(capsys):
    @print_errors_as_sentences
    def command():
        raise ValueError(f"first\nsecond\x1b[2J\r{FORGED}")

    with pytest.raises(Exception):      # noqa: B017 -- typer.Exit
        command()
    assert capsys.readouterr().err == f"Error: first\nsecond\\x1b[2J\\r{FORGED}\n"


def test_lines_of_a_log_begin_with_their_time_and_others_are_indented(tmp_path):
    append_to_log(tmp_path, f"Traceback\n  in f\n{EVIL}\n")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 4
    assert [line[:2] for line in lines[1:]] == ["  "] * 3
    assert lines[0].endswith(" Traceback")
    assert one_line(EVIL).isprintable()
    assert escaped_lines("a\u2028b") == "a\\u2028b"
    assert len(one_line("x" * 5000, 100)) < 100


def test_an_honest_reply_is_not_a_problem():
    """The oracle of `say`: what it sends is a well-formed reply."""
    assert read_reply(b"letter", say(None)(0, 0, b"letter", b"")).problem.decode() == EVIL
