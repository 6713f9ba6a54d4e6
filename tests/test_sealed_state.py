"""The state of a node over Flower, which Flower holds between two messages: sealed, and the newest one only.

Messages go through the node's ClientApp, with a context for each node as a SuperNode has it: what it holds is all that survives.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")
from flwr.common import ConfigRecord, Context, RecordDict

import fedtail
from fedtail.deployment import RemoteFleet
from fedtail.deployment.flower import node_app
from fedtail.deployment.flower.sealed_state import HOME, MANY, SealedState, make_state_key
from fedtail.deployment.node_messages import NodeMessage, encode_message, read_reply
from fedtail.deployment.node_process import only_process
from fedtail.deployment.site import Site
from fedtail.secure.encoding import Refused
from fedtail.secure.frames import decode_bundle

from departing_server import Nodes
from remote_cases import TASK

RUN = 7


class OverFlower(Nodes):
    """Nodes whose every message is a process of Flower's; `boxes` has, by node, what Flower held after each of them."""

    def __init__(self, place: Path):
        super().__init__(place)
        for k in self.settings:
            self.start(k)
        self.boxes: dict[int, list[bytes]] = {k: [] for k in self.settings}
        self.replies: dict[int, list[bytes]] = {k: [] for k in self.settings}
        self.letters: list[dict[int, bytes]] = []

    def start(self, node: int) -> None:
        """A new SuperNode, which holds nothing."""
        home = self.settings[node].folder / HOME
        home.mkdir(exist_ok=True)
        make_state_key(home)
        self.held = {**getattr(self, "held", {}), node: RecordDict()}

    def answer(self, node: int, letter: bytes) -> bytes:
        config = {"settings": str(self.settings[node].folder / "node.toml")}
        context = Context(run_id=RUN, node_id=node + 1, node_config=config, state=self.held[node], run_config={})
        message = SimpleNamespace(content=RecordDict({"fedtail": ConfigRecord({"letter": letter})}))
        reply = node_app.answer_message(message, context)
        self.boxes[node].append(context.state["fedtail"]["site"])
        self.replies[node].append(reply.content["fedtail"]["reply"])
        return self.replies[node][-1]

    def hold(self, node: int, box: object) -> None:
        """Flower holds this now as the state of the node."""
        self.held[node] = RecordDict({"fedtail": ConfigRecord({"site": box})})

    def exchange(self, letters):
        self.letters.append(dict(letters))
        return {node: self.answer(node, letter) for node, letter in letters.items()}

    def refusals(self, node: int) -> list[str]:
        lines = (self.settings[node].folder / "audit.jsonl").read_text().splitlines()
        return [line["why"] for line in map(json.loads, lines) if line["what"] == "refused"]


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(node_app, "Message", lambda content, reply_to: SimpleNamespace(content=content))      # outside of Flower's processes
    made = OverFlower(tmp_path)
    with ExitStack() as running:
        for settings in made.settings.values():
            running.enter_context(only_process(settings.folder))
        yield made


@pytest.fixture
def home(tmp_path):
    """Of a node that runs."""
    made = tmp_path / HOME
    made.mkdir()
    make_state_key(made)
    with only_process(tmp_path):
        yield made


def train(nodes, rounds=2):
    fleet = RemoteFleet(nodes.exchange, nodes.registry)
    return fedtail.train(nodes.method, TASK, fleet=fleet, rounds=rounds, channel=fedtail.SecureChannel(16, minimum_contributors=5),
                         progress=False)


def test_what_flower_holds_tells_nothing_and_the_model_is_the_same(nodes, monkeypatch):
    saved, save = [], Site.save
    monkeypatch.setattr(Site, "save", lambda site: saved.append(save(site)) or saved[-1])
    found = train(nodes)
    with tempfile.TemporaryDirectory() as place:
        plain = Nodes(Path(place))
        assert torch.equal(train(plain).state.params, found.state.params)
    boxes = [box for held in nodes.boxes.values() for box in held]
    states = saved[: len(boxes)]
    assert len(set(boxes)) == len(boxes) == 18
    assert max(map(len, states)) > 1000
    for box in boxes:                                    # no 8 bytes of any state of a node stand in any box
        pieces = {box[k: k + 8] for k in range(len(box) - 7)}
        assert not any(state[k: k + 8] in pieces for state in states for k in range(0, len(state) - 7, 8) if any(state[k: k + 8]))
    assert not any(nodes.refusals(k) for k in nodes.settings)


def test_an_older_state_answers_nothing_twice_and_the_node_goes_on_as_after_a_restart(nodes):
    """From the state before it unmasked, a node would give away its secrets once more, for another list of who is missing."""
    train(nodes, rounds=1)
    numbers = [number for number, letters in enumerate(nodes.letters) if 0 in letters]
    unmasked = next(number for number in reversed(numbers) if answered(nodes.letters[number][0], nodes.replies[0][numbers.index(number)]))
    letter = nodes.letters[unmasked][0]
    nodes.hold(0, nodes.boxes[0][numbers.index(unmasked) - 1])
    assert not answered(letter, nodes.answer(0, letter))
    assert "is not the last one that this node sealed" in nodes.refusals(0)[0]
    assert train(nodes, rounds=1).state.round == 1       # it takes part again
    assert nodes.refusals(1) == nodes.refusals(2) == []


def answered(letter, reply):
    """Whether a reply holds an answer to a message of a secure sum."""
    found = read_reply(letter, reply).secure
    return bool(found and decode_bundle(found))


NOTHING = encode_message(NodeMessage(b"run", 0, 0))


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "taken away", "no bytes", "no state", "another node's", "of another run", "of another start"])
def test_what_is_not_the_last_state_is_refused_in_words(nodes, damage):
    for k in (0, 1):
        nodes.answer(k, NOTHING)
    box = nodes.boxes[0][-1]
    given = {"changed": bytes([box[0] ^ 1]) + box[1:], "cut": box[:-1], "empty": b"", "no bytes": "text", "another node's": nodes.boxes[1][-1],
             "of another run": sealed(nodes, 0, RUN + 1).seal(b"state"), "of another start": box}
    if damage in given:
        nodes.hold(0, given[damage])
    else:
        nodes.held[0] = RecordDict({} if damage == "taken away" else {"fedtail": ConfigRecord({"other": 1})})
    if damage == "of another start":
        make_state_key(nodes.settings[0].folder / HOME)
    assert not read_reply(NOTHING, nodes.answer(0, NOTHING)).problem      # as a node that was started again
    assert len(nodes.refusals(0)) == 1
    nodes.answer(0, NOTHING)
    assert len(nodes.refusals(0)) == 1                   # what it sealed then is its state


def sealed(nodes, node, run=RUN):
    settings = nodes.settings[node]
    return SealedState(settings.folder / HOME, settings.name, run)


def test_a_box_is_of_one_node_and_run_also_where_its_digest_was_put_in_place(nodes, tmp_path):
    home = nodes.settings[0].folder / HOME
    box = sealed(nodes, 0).seal(b"state")
    (home / "state" / f"{RUN + 1}.last").write_bytes((home / "state" / f"{RUN}.last").read_bytes())
    for other in (SealedState(home, "south", RUN), SealedState(home, "north", RUN + 1)):
        with pytest.raises(Refused, match="sealed for another node, run or start"):
            other.open(box)
    assert sealed(nodes, 0).open(box) == b"state"
    assert b"state" not in box
    assert sealed(nodes, 0).seal(b"state") != sealed(nodes, 0).seal(b"state")


def test_the_key_is_for_the_owner_only_and_new_at_every_start(home):
    keys = set()
    for _ in range(2):
        make_state_key(home)
        assert stat.S_IMODE((home / "state").stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "state" / "key").stat().st_mode) == 0o600
        keys.add((home / "state" / "key").read_bytes())
    assert [len(key) for key in keys] == [32, 32]


def test_a_node_of_many_runs_forgets_the_first_ones(home):
    boxes = [SealedState(home, "north", run).seal(b"state") for run in range(MANY + 3)]
    assert len(list((home / "state").glob("*.last"))) == MANY
    assert SealedState(home, "north", MANY + 2).open(boxes[-1]) == b"state"
    with pytest.raises(Refused, match="not the last one"):
        SealedState(home, "north", 0).open(boxes[0])


def test_a_supernode_that_was_started_by_hand_answers_nothing(tmp_path, home):
    text = r"where `fedtail node run node\.toml` started it"
    with pytest.raises(ValueError, match=text):
        SealedState(tmp_path / "other" / HOME, "north", RUN)
    stopped = shutil.copytree(tmp_path, tmp_path.with_name("stopped"))        # its key is still there
    with pytest.raises(ValueError, match=text):
        SealedState(stopped / HOME, "north", RUN)
    SealedState(home, "north", RUN)
    (home / "state" / "key").unlink()
    with pytest.raises(ValueError, match=text):
        SealedState(home, "north", RUN)
