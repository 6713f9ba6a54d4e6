"""Attacks on nodes by a server that departs from the protocol: each fails against nodes as they are, and succeeds without a defence.

Both halves are in the attack (`make attacks`): its outcome holds only if it fails with the defences and succeeds with them switched off.
"""

from __future__ import annotations

import importlib

import pytest

ATTACKS = ("asked_again", "bound", "importance", "numbering", "one_client_often", "replayed_round", "restarted_server", "threshold",
           "unnoised", "unsigned")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_a_node_fails_and_would_succeed_without_its_defence(name):
    outcome = importlib.import_module(f"attack_node_{name}").attack()
    assert outcome.held, outcome.measured
