"""`TailStrategy` with stock ClientApps, over a grid that runs them in this process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from fedtail.deployment.flower import TailStrategy  # noqa: E402
from fedtail.risk import superquantile_weights  # noqa: E402

TARGETS, EXAMPLES = [0.0, 1.0, 2.0, 5.0, 9.0], [10, 20, 10, 30, 10]
app = ClientApp()


@app.train()
def train(message, context):
    """A stock app: one gradient step on (w - target)^2 / 2."""
    w = message.content["arrays"]["w"].numpy()
    step = 0.5 * (context.node_config["target"] - w)
    metrics = MetricRecord({"train_loss": 0.0, "num-examples": context.node_config["examples"]})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(w + step)}), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    w = float(message.content["arrays"]["w"].numpy()[0])
    loss = (w - context.node_config["target"]) ** 2 / 2
    metrics = MetricRecord({"eval_loss": loss if not context.node_config.get("broken") else math.nan, "num-examples": context.node_config["examples"]})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Messages are made by tasks of a run, which there is none of here."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


class GridHere:
    """The part of Flower's grid that strategies use, with nodes in this process."""

    def __init__(self, fails=()):
        self.nodes = {100 + k: Context(1, 100 + k, {"target": t, "examples": n}, RecordDict(), {}) for k, (t, n) in enumerate(zip(TARGETS, EXAMPLES, strict=True))}
        self.fails, self.asked = set(fails), []

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            self.asked.append((kind, node))
            if (kind, node) in self.fails:
                replies.append(Message(Error(0, "it failed"), reply_to=message))
            else:
                replies.append(app(message, self.nodes[node]))
        return replies


def model(w):
    return ArrayRecord({"w": Array(np.array([w]))})


def step_by_hand(w, theta, without=()):
    who = [k for k in range(5) if k not in without]
    targets, mass = torch.tensor(TARGETS)[who].double(), torch.tensor(EXAMPLES)[who].double()
    weights = superquantile_weights((w - targets) ** 2 / 2, mass, theta)
    return float((weights * (w + 0.5 * (targets - w))).sum())


@pytest.mark.parametrize("theta", [1.0, 0.5, 0.2])
def test_stock_clients_train_for_the_tail(theta):
    grid, strategy = GridHere(), TailStrategy(tail_fraction=theta, fraction_evaluate=0.0)
    result = strategy.start(grid, model(3.0), num_rounds=3)
    expected = 3.0
    for _ in range(3):
        expected = step_by_hand(expected, theta)
    assert float(result.arrays["w"].numpy()[0]) == pytest.approx(expected, rel=1e-12)
    trained = [node for kind, node in grid.asked if kind == "train"]
    assert len(trained) == 15 if theta == 1 else len(trained) < 15


def test_who_fails_or_has_no_finite_loss_is_left_out():
    grid = GridHere(fails=[("evaluate", 104)])
    grid.nodes[103].node_config["broken"] = True
    result = TailStrategy(tail_fraction=0.5, fraction_evaluate=0.0).start(grid, model(3.0), num_rounds=1)
    assert float(result.arrays["w"].numpy()[0]) == pytest.approx(step_by_hand(3.0, 0.5, without=(3, 4)))
    nobody = GridHere(fails=[("evaluate", 100 + k) for k in range(5)])
    assert not TailStrategy(tail_fraction=0.5, fraction_evaluate=0.0).start(nobody, model(3.0), num_rounds=1).arrays


def test_it_says_what_the_server_sees(caplog):
    import logging

    logging.getLogger("flwr").propagate = True
    with caplog.at_level("INFO", logger="flwr"):
        TailStrategy(tail_fraction=0.5, fraction_evaluate=0.0).summary()
    assert "the server sees the loss and the update of every node" in caplog.text


def test_refusals():
    with pytest.raises(ValueError, match=r"tail_fraction \(theta\) must be in \(0, 1\], got 80"):
        TailStrategy(tail_fraction=80)
    with pytest.raises(ValueError, match=r"evaluate gives eval_loss, num-examples, and no 'loss'\. Write TailStrategy\(loss_key=\.\.\.\)"):
        TailStrategy(tail_fraction=0.5, loss_key="loss", fraction_evaluate=0.0).start(GridHere(), model(3.0), num_rounds=1)
