"""Canaries over nodes: training by the deployment's own `Node` and `Site`, in this process, observed by a curious node.

The observer is the node that holds most clients. It follows the protocol and knows what it sent, its own clients' shares of the
noise included, so it takes all of that off the released sums; canaries are at the other nodes.
"""

from __future__ import annotations

from torch import Tensor

import fedtail
from fedtail.answering import row_bound_for
from fedtail.deployment import Node, Site
from fedtail.privacy import SystemRandomness

from audits.canaries import CLIP, WIDE, Canaries, Observations, OverheardMasked, channel_for, observe
from remote_cases import Sites

NODES = 3


class CuriousNode(Node):
    """A node that remembers what it sent last, in the units of the released sums."""

    sent: Tensor

    def _encoded_sums(self, ask: bytes) -> tuple[Tensor, ...]:
        """The partial sums that are sent, encoded; decoded ones are kept."""
        encoded, asked = super()._encoded_sums(ask), self._read_ask(ask)
        question = asked.questions[0]
        decoded = asked.encoding.decode(encoded[0], row_bound_for(question, encoded[0].shape[-1], asked.encoding))
        shares = not question.mechanism.reveals_exact_sum
        self.sent = question.mechanism.on_server(decoded, SystemRandomness()) if shares else decoded
        return encoded


class CuriousSites(Sites):
    """Sites of which the first one is curious."""

    def fresh(self, node: int) -> Site:
        """A node's front; the first one's node is curious."""
        made = (CuriousNode if node == 0 else Node)(self.people[node], self.task, dtype=WIDE, workers=1)
        if node == 0:
            self.curious = made
        return Site(lambda: made, **{"masked_only": False, **self.settings})


def observe_nodes(noise: str, masked: bool, rounds: int, multiplier: float, wanted: int, seed: int | None, clients: int = 300) -> Observations:
    """DP-FedAvg over three nodes; noise always comes from the operating system of the nodes, and with "gaussian" from the server."""
    canaries = Canaries(2 * clients // NODES, fillers=clients // NODES)         # the first third, at the curious node, are fillers
    planned = {"planned_clients": canaries.count} if noise == "discrete" else {}
    method = fedtail.dp_fedavg(len(canaries), CLIP, multiplier, cohort_size=len(canaries), noise=noise, learning_rate=1.0,
                               batch_size=None, **planned)
    channel = OverheardMasked(canaries.count, minimum_contributors=3) if masked else channel_for(noise)
    sites = CuriousSites(NODES, canaries.population, canaries.task)

    return observe(method, canaries, channel, wanted, seed, rounds=rounds, fleet=sites.fleet(),
                   known=lambda question: sites.curious.sent)
