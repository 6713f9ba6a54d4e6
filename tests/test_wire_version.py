"""Servers and nodes of two releases refuse each other in words, and never read each other's bytes as something else."""

from __future__ import annotations

import struct
from pathlib import Path

import msgpack
import pytest

from fedtail.deployment import Site, registry, wire_version
from fedtail.deployment.node_messages import NodeMessage, encode_message, message_digest, read_message, read_reply
from fedtail.deployment.registry import read_signed_info, signed_node_info
from fedtail.deployment.settings import NodeSettings
from fedtail.deployment.signed_info import encode_request, new_challenge
from fedtail.deployment.wire_version import WIRE_VERSION, other_version_text, wire_version_of, with_version, without_version
from fedtail.secure import Refused


def blob(content):
    return struct.pack(">I", len(content)) + content


def message_of_version_1(ask=b"question"):
    """A server's message as fedtail 0.2 wrote it, by hand: run, node, number, broadcasts, question, secure."""
    return blob(bytes(16)) + struct.pack(">QQ", 3, 1) + struct.pack(">I", 0) + blob(ask) + blob(b"")


def reply_of_version_1(about, problem=b""):
    return about + blob(b"") + blob(b"") + blob(problem)


def never():
    raise AssertionError("the part that computes was asked")


def test_a_header_says_the_version_and_what_has_none_is_of_version_1():
    assert wire_version_of(with_version(b"")) == WIRE_VERSION
    assert without_version(with_version(b"abc"), "node") == b"abc"
    assert [wire_version_of(one) for one in (b"", b"FT", b"FT\0", b"FT\0\7rest", message_of_version_1())] == [1, 1, 1, 7, 1]


def test_who_must_upgrade_is_the_older_side():
    assert other_version_text(1, "node").endswith("install at least this fedtail on the node.")
    assert other_version_text(1, "server").endswith("install at least this fedtail on the server.")
    assert other_version_text(WIRE_VERSION + 1, "node").endswith("install a newer fedtail on the server.")
    assert other_version_text(WIRE_VERSION + 1, "server").endswith("install a newer fedtail on the node.")


def test_a_node_answers_a_message_of_another_version_with_a_sentence_and_computes_nothing():
    site = Site(never, masked_only=False)
    for content, theirs in ((message_of_version_1(), 1), (b"FT" + (WIRE_VERSION + 1).to_bytes(2, "big") + bytes(99), WIRE_VERSION + 1)):
        problem = read_reply(content, site.handle(content)).problem.decode()
        assert problem == other_version_text(theirs, "server")


def test_a_server_takes_no_reply_of_another_version():
    message = encode_message(NodeMessage(b"run", 3, 1))
    with pytest.raises(Refused, match=r"the node speaks wire version 1, and this server \(fedtail .*\) version 2"):
        read_reply(message, reply_of_version_1(message_digest(message)))
    with pytest.raises(Refused, match="the node speaks wire version 9"):
        read_reply(message, b"FT\0\x09" + bytes(44))


def test_messages_have_the_fields_of_their_version():
    """When this fails, what servers and nodes send has changed: raise WIRE_VERSION, and write the new layout here."""
    written = encode_message(NodeMessage(b"r" * 16, 3, 5, (b"o",), b"ask", b"secure", b"t" * 16, 7))
    by_hand = (b"FT\0\2" + blob(b"r" * 16) + struct.pack(">QQ", 3, 5) + struct.pack(">I", 1) + blob(b"o") + blob(b"ask") + blob(b"secure")
               + blob(b"t" * 16) + struct.pack(">Q", 7))
    assert (WIRE_VERSION, written) == (2, by_hand)
    assert read_message(by_hand).round == 7
    assert encode_request(bytes(32), b"t") == b"FT\0\2" + blob(bytes(32)) + blob(b"t")


def test_a_node_says_no_to_a_server_of_another_version_in_its_own_log_and_to_the_server(monkeypatch, caplog):
    settings = NodeSettings(Path(), "north", "experiment.toml", "d.npz")       # whose files do not exist: nothing of it is read
    said = signed_node_info(settings, bytes(32))                               # what a server of version 1 sends: the challenge
    assert "the server speaks wire version 1" in caplog.text
    length = struct.unpack(">I", said[:4])[0]
    assert msgpack.unpackb(said[4:4 + length])["type"] == "node of a newer fedtail; upgrade the server"      # which it logs
    newer = signed_node_info(settings, b"FT\0\x09" + bytes(100))
    assert "the server speaks wire version 9" in caplog.text
    assert newer == with_version(b"")
    monkeypatch.setattr(wire_version, "WIRE_VERSION", 9)
    monkeypatch.setattr(wire_version, "READABLE", frozenset({9}))
    monkeypatch.setattr(registry, "READABLE", frozenset({9}))
    with pytest.raises(ValueError, match=r"the node speaks wire version 2, and this server .* version 9: install at least this fedtail on the node"):
        read_signed_info(newer, new_challenge(), {})


@pytest.mark.deploy
def test_a_node_one_version_apart_is_refused_in_words_on_both_sides_and_the_others_go_on(tmp_path):
    pytest.importorskip("nvflare")
    from life_cases import Life

    for theirs, who in ((WIRE_VERSION + 1, "server"), (WIRE_VERSION - 1, "node")):
        with Life(tmp_path / str(theirs), nodes=4, rounds=4000) as life:
            faulty = {"PYTHONPATH": str(Path(__file__).parent / "deploy_versions"), "FEDTAIL_WIRE": str(theirs)}
            for name in life.names:
                life.loopback.start_node(name, **(faulty if name == "node-4" else {}))
            life.serve(nodes=3)
            life.until(f"node node-4 is left out: the node speaks wire version {theirs}, and this server")
            life.rounds_more(5)
            assert " lost" not in life.log()
            assert "node-4 has joined" not in life.log()
            told = life.loopback.log_file("node-4").read_text()
            assert f"not taking part: the server speaks wire version {WIRE_VERSION}" in told
            other = "node" if who == "server" else "server"
            assert f"on the {who}." in life.log()
            assert f"on the {'server' if theirs > WIRE_VERSION else 'node'}." in told, other
