"""When a node answers: at a fixed time after the question, so that the time does not tell who is in the tail."""

import time

import attack_answer_times as timing
import pytest

from fedtail.deployment import Node, Site
from fedtail.deployment import site as site_module
from fedtail.deployment.node_messages import NodeMessage, encode_message, read_reply
from fedtail.deployment.settings import NodeSettings

from remote_cases import PEOPLE, TASK

LETTER = encode_message(NodeMessage(b"run", 0, 1, ask=b"no question"))


def site(**settings):
    return Site(lambda: Node(PEOPLE, TASK, workers=1), **settings)


def test_answer_times_tell_the_tail_unless_they_are_fixed():
    """By a rank-sum test at an error rate of 0.001: wrongly accused are answers at fixed times in one of 1000 runs at most."""
    tail, seconds = timing.observed(4, 1, 0.0)
    assert timing.guessed_right(tail, seconds) > 0.9
    assert timing.tells(tail, seconds) < timing.ERROR_RATE
    tail, seconds = timing.observed(4, 1, timing.AFTER)
    assert timing.tells(tail, seconds) > timing.ERROR_RATE
    assert seconds.min() >= timing.AFTER


def test_a_late_answer_leaves_at_the_next_multiple_and_is_logged_on_the_node(caplog):
    one = site(answer_after=0.1)
    for late, leaves in ((0.0, 0.1), (0.25, 0.3), (0.3, 0.4)):
        caplog.clear()
        began = time.monotonic() - late
        reply = one.handle(LETTER, began)
        assert time.monotonic() - began >= leaves
        assert read_reply(LETTER, reply).problem                         # which tells the server nothing of the time
        assert ("longer than answer_after = 0.1 s" in caplog.text) == (late > 0)


def test_the_state_is_kept_before_the_answer_leaves(monkeypatch):
    done, kept = [], []
    monkeypatch.setattr(site_module.time, "sleep", lambda seconds: done.append("waited"))
    one = site(answer_after=0.1)
    one.handle(LETTER, keep=lambda saved: (done.append("kept"), kept.append(saved)))
    assert done == ["kept", "waited"]
    assert kept == [one.save()]
    site().handle(LETTER)
    assert done == ["kept", "waited"]                                 # at once, by default


def test_a_node_is_given_its_time_in_its_settings(tmp_path):
    text = 'name = "north"\nexperiment = "experiment.toml"\ndata = "d.npz"\n'
    for line, seconds in (("", 0.0), ("answer_after = 2.5\n", 2.5), ("answer_after = 3\n", 3.0)):
        (tmp_path / "node.toml").write_text(text + line)
        assert NodeSettings.read(tmp_path / "node.toml").make_site().answer_after == seconds
    for wrong in ("-1.0", "inf", "nan"):
        (tmp_path / "node.toml").write_text(f"{text}answer_after = {wrong}\n")
        with pytest.raises(ValueError, match="answer_after must be"):
            NodeSettings.read(tmp_path / "node.toml")
        with pytest.raises(ValueError, match="answer_after must be 0 or more seconds"):
            site(answer_after=float(wrong))
