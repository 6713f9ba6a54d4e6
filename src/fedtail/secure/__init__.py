"""Secure summation: a server learns the sum of integer vectors modulo 2^k, and nothing else about any of them.

After Bonawitz et al. 2017, with a complete graph: it goes on when clients drop out, as long as a threshold stays. No transport is
in here, and nothing of training: messages are bytes, and `Exchange` is whatever carries them.
"""

from fedtail.secure.client import Client
from fedtail.secure.encoding import Refused, TooFew
from fedtail.secure.identity import Identity
from fedtail.secure.local import KEYS, ROW, SHARES, UNMASK, LocalClients, secure_sum
from fedtail.secure.masks import centred
from fedtail.secure.messages import Ask, Run, Session
from fedtail.secure.participant import Participant
from fedtail.secure.rounds import Exchange, Rounds, TogetherRounds
from fedtail.secure.server import Server, Sum
from fedtail.secure.together import Missing, TogetherClient, TogetherServer

__all__ = [
    "KEYS", "ROW", "SHARES", "UNMASK", "Ask", "Client", "Exchange", "Identity", "LocalClients", "Missing", "Participant",
    "Refused", "Rounds", "Run", "Server", "Session", "Sum", "TogetherClient", "TogetherRounds", "TogetherServer", "TooFew",
    "centred", "secure_sum",
]
