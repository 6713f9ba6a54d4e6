"""Secure aggregation: a server learns the sum of integer vectors modulo 2^k, and nothing else about any of them.

Dropout-tolerant after Bonawitz et al. 2017, with a complete graph: it goes on when clients drop out, as long as a threshold
stays; or all-or-nothing, for few reliable sites. No transport is in here, and nothing of training: messages are bytes, and
`Exchange` is whatever transports them.
"""

from fedtail.secure.all_or_nothing import Missing, TogetherClient, TogetherServer
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.exchanges import Exchange, Rounds, TogetherRounds
from fedtail.secure.identity import Identity
from fedtail.secure.in_process import KEYS, ROW, SHARES, UNMASK, LocalClients, secure_sum
from fedtail.secure.masks import centred
from fedtail.secure.messages import Ask, Run, Session
from fedtail.secure.participant import Participant
from fedtail.secure.sum_client import Client
from fedtail.secure.sum_server import Server, Sum

__all__ = [
    "KEYS", "ROW", "SHARES", "UNMASK", "Ask", "Client", "Exchange", "Identity", "LocalClients", "Missing", "Participant",
    "Refused", "Rounds", "Run", "Server", "Session", "Sum", "TogetherClient", "TogetherRounds", "TogetherServer", "TooFew",
    "centred", "secure_sum",
]
