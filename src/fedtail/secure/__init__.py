"""Secure aggregation: a server learns the sum of integer vectors modulo 2^k, and nothing else about any of them.

Dropout-tolerant after Bonawitz et al. 2017, where every pair of clients shares a mask, or after Bell et al. 2020, where each
client has few neighbours (`sparse_session`): it goes on when clients drop out, as long as a threshold stays; or all-or-nothing,
for few reliable sites. No transport is in here, and nothing of training: messages are bytes, and `Exchange` is whatever
transports them.
"""

from fedtail.deprecated import old_names
from fedtail.secure.all_or_nothing import AllOrNothingClient, AllOrNothingServer, Missing
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.exchanges import AllOrNothingRounds, Exchange, Rounds
from fedtail.secure.identity import Identity, signed_threshold
from fedtail.secure.in_process import KEYS, ROW, SHARES, UNMASK, LocalClients, secure_sum
from fedtail.secure.masks import centre_residues
from fedtail.secure.messages import Ask, Run, Session
from fedtail.secure.participant import Participant
from fedtail.secure.sparse_graph import disclosure_probability, fewest_neighbours, loss_probability
from fedtail.secure.sparse_messages import SparseSession, sparse_session
from fedtail.secure.sum_client import Client
from fedtail.secure.sum_server import Server, Sum

__all__ = [
    "KEYS", "ROW", "SHARES", "UNMASK", "AllOrNothingClient", "AllOrNothingRounds", "AllOrNothingServer", "Ask", "Client",
    "Exchange", "Identity", "LocalClients", "Missing", "Participant", "Refused", "Rounds", "Run", "Server", "Session",
    "SparseSession", "Sum", "TooFew", "centre_residues", "disclosure_probability", "fewest_neighbours", "loss_probability",
    "secure_sum", "signed_threshold", "sparse_session",
]

__getattr__ = old_names(__name__)
