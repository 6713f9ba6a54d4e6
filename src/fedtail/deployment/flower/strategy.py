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
        """Set up FedAvg with `settings`, which are passed on to it. Raises ValueError unless 0 < `tail_fraction` (theta) <= 1.

        `loss_key` is the name of the loss in replies to evaluate, `loss_timeout` how many seconds to wait for them.
        """
        from fedtail.risk.base import check_tail_fraction

        check_tail_fraction(tail_fraction)
        super().__init__(**settings)
        self.tail_fraction, self.loss_key, self.loss_timeout = tail_fraction, loss_key, loss_timeout
        self.weights: dict[int, float] = {}              # by node, of the round under way

    def summary(self) -> None:
        """Log FedAvg's settings and the tail, and a warning that the server sees the loss and update of every node."""
        super().summary()
        log.info("\t└──> Tail: worst %g of the nodes by %s", self.tail_fraction, self.loss_key)
        log.warning(SEES)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Have the sampled nodes evaluate the model in `arrays`; returns the training messages of those with weight in the tail.

        Sends messages through `grid` and waits at most `loss_timeout` seconds; nodes that do not answer in time, or with an
        error, get no weight. Sets `weights` to the superquantile weights by node. FedAvg samples the nodes and makes the messages
        for `server_round` from `arrays` and `config`. Raises ValueError where a reply lacks `loss_key`.
        """
        sampled = list(super().configure_train(server_round, arrays, config, grid))
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: ConfigRecord({"server-round": server_round})})
        queries = [Message(record, dst_node_id=one.metadata.dst_node_id, message_type=MessageType.EVALUATE) for one in sampled]
        replies = grid.send_and_receive(queries, timeout=self.loss_timeout)
        self.weights = self._tail_weights([reply for reply in replies if not reply.has_error()])
        return [one for one in sampled if self.weights.get(one.metadata.dst_node_id, 0.0) > 0]

    def _tail_weights(self, replies: list[Message]) -> dict[int, float]:
        """The superquantile weights of the nodes that sent these replies, by Flower's id; they sum to 1.

        Nodes without a finite loss or a positive mass are left out; {} where none is left. Raises ValueError where a reply lacks
        `loss_key`.
        """
        import torch

        from fedtail.risk.superquantile import superquantile_weights

        found = {reply.metadata.src_node_id: self._loss_and_mass(reply) for reply in replies}
        found = {node: (loss, mass) for node, (loss, mass) in found.items() if math.isfinite(loss) and mass > 0}
        if not found:
            return {}
        losses, mass = (torch.tensor(one, dtype=torch.float64) for one in zip(*found.values(), strict=True))
        return dict(zip(found, superquantile_weights(losses, mass, self.tail_fraction).tolist(), strict=True))

    def _loss_and_mass(self, reply: Message) -> tuple[float, float]:
        """The pair (loss, mass) from a node's reply to evaluate; mass is its number of examples, 1.0 where the reply has none.

        A loss that is a list becomes NaN, and such a mass 0.0, so that the node gets no weight. Raises ValueError where the reply
        lacks `loss_key`.
        """
        metrics = {name: value for record in reply.content.metric_records.values() for name, value in record.items()}
        if self.loss_key not in metrics:
            raise ValueError(f"evaluate gives {', '.join(map(str, metrics)) or 'no metrics'}, and no {self.loss_key!r}. Write "
                             "TailStrategy(loss_key=...), or return the mean loss of the node under that name.")
        loss, mass = metrics[self.loss_key], metrics.get(self.weighted_by_key, 1.0)
        return (math.nan if isinstance(loss, list) else float(loss)), (0.0 if isinstance(mass, list) else float(mass))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The pair (model, metrics): the mean of the models in `replies` by their tail weights, and metrics as FedAvg gives them.

        Weights are divided by their sum over the nodes that replied. (None, None) where no node with weight did. FedAvg is passed
        the number of the round, `server_round`.
        """
        valid, _ = self._check_and_log_replies(list(replies), is_train=True)
        weighted = [(reply.content, self.weights.get(reply.metadata.src_node_id, 0.0)) for reply in valid]
        total = sum(weight for _, weight in weighted)
        if not total:
            return None, None
        metrics = self.train_metrics_aggr_fn([content for content, _ in weighted], self.weighted_by_key)
        models = [(next(iter(content.array_records.values())), weight / total) for content, weight in weighted]
        return weighted_sum_of_models(models), metrics


def weighted_sum_of_models(models: list[tuple[ArrayRecord, float]]) -> ArrayRecord:
    """The sum of weight times model over the pairs in `models`, array by array, with the names of the first model.

    Computed in float64 and cast back to the first model's dtypes. For a mean the weights must sum to 1; `models` must not be
    empty.
    """
    first = models[0][0]
    means = {name: sum(weight * arrays[name].numpy().astype(np.float64) for arrays, weight in models) for name in first}
    return ArrayRecord({name: Array(np.asarray(mean, first[name].numpy().dtype)) for name, mean in means.items()})
