"""Delta-FL for ClientApps that know nothing of fedtail: a strategy for Flower's own API."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.common import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

log = logging.getLogger("flwr")
SEES = "TailStrategy: the server sees the loss and the update of every node. fedtail deploy masks both."


class TailStrategy(FedAvg):
    """Train for the worst `tail_fraction` (theta) of the nodes, by their losses under the current model.

    Every round the sampled nodes evaluate the model first; those in the tail, by the weights of the superquantile, are then sent
    the training message, and their models are averaged with these weights. Nodes are stock ClientApps with `train` and
    `evaluate`; the reply to evaluate holds `loss_key` and the number of examples. theta = 1 is FedAvg. Nothing is hidden here:
    the server sees losses and updates, as with any of Flower's strategies. Other settings are those of `FedAvg`.
    """

    def __init__(self, tail_fraction: float, loss_key: str = "eval_loss", loss_timeout: float = 3600.0, **settings: Any):
        """`loss_timeout` is how many seconds to wait for losses; `settings` go to `FedAvg`. ValueError unless 0 < theta <= 1."""
        from fedtail.risk.base import check_tail_fraction

        check_tail_fraction(tail_fraction)
        super().__init__(**settings)
        self.tail_fraction, self.loss_key, self.loss_timeout = tail_fraction, loss_key, loss_timeout
        self.weights: dict[int, float] = {}              # by node, of the round under way

    def summary(self) -> None:
        """Log the settings, and that the server sees every loss and update."""
        super().summary()
        log.info("\t└──> Tail: worst %g of the nodes by %s", self.tail_fraction, self.loss_key)
        log.warning(SEES)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask the sampled nodes to evaluate the model, and give the training messages of those in the tail, which have weight.

        Waits `loss_timeout` seconds at most; nodes that do not answer have no weight.
        """
        sampled = list(super().configure_train(server_round, arrays, config, grid))
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord({"server-round": server_round})})
        queries = [Message(record, dst_node_id=one.metadata.dst_node_id, message_type=MessageType.EVALUATE) for one in sampled]
        replies = grid.send_and_receive(queries, timeout=self.loss_timeout)
        self.weights = self._tail_weights([reply for reply in replies if not reply.has_error()])
        return [one for one in sampled if self.weights.get(one.metadata.dst_node_id, 0.0) > 0]

    def _tail_weights(self, replies: list[Message]) -> dict[int, float]:
        """The superquantile weight of each node by its id; nodes without a finite loss or a positive mass are left out."""
        import torch

        from fedtail.risk.superquantile import superquantile_weights

        found = {reply.metadata.src_node_id: self._loss_and_mass(reply) for reply in replies}
        found = {node: (loss, mass) for node, (loss, mass) in found.items() if math.isfinite(loss) and mass > 0}
        if not found:
            return {}
        losses, mass = (torch.tensor(one, dtype=torch.float64) for one in zip(*found.values(), strict=True))
        return dict(zip(found, superquantile_weights(losses, mass, self.tail_fraction).tolist(), strict=True))

    def _loss_and_mass(self, reply: Message) -> tuple[float, float]:
        """The loss in a node's reply to evaluate, and its number of examples as mass (1 without one).

        NaN, and a mass of 0, for lists. A ValueError where the reply has no `loss_key`.
        """
        metrics = {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
        if self.loss_key not in metrics:
            raise ValueError(f"evaluate gives {', '.join(map(str, metrics)) or 'no metrics'}, and no {self.loss_key!r}. Write "
                             "TailStrategy(loss_key=...), or return the mean loss of the node under that name.")
        loss, mass = metrics[self.loss_key], metrics.get(self.weighted_by_key, 1.0)
        return (math.nan if isinstance(loss, list) else float(loss)), (0.0 if isinstance(mass, list) else float(mass))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean of the models of the tail by their weights, and Flower's metrics.

        (None, None) where no node in it answered.
        """
        valid, _ = self._check_and_log_replies(list(replies), is_train=True)
        weighted = [(reply.content, self.weights.get(reply.metadata.src_node_id, 0.0)) for reply in valid]
        total = sum(weight for _, weight in weighted)
        if not total:
            return None, None
        metrics = self.train_metrics_aggr_fn([content for content, _ in weighted], self.weighted_by_key)
        models = [(next(iter(content.array_records.values())), weight / total) for content, weight in weighted]
        return weighted_mean(models), metrics


def weighted_mean(models: list[tuple[ArrayRecord, float]]) -> ArrayRecord:
    """The sum of weight times model, array by array, in float64 and cast back to the arrays' own dtype; weights sum to 1."""
    first = models[0][0]
    means = {name: sum(weight * arrays[name].numpy().astype(np.float64) for arrays, weight in models) for name in first}
    return ArrayRecord({name: Array(np.asarray(mean, first[name].numpy().dtype)) for name, mean in means.items()})
