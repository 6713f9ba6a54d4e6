"""The one door between clients and server: what is sent, and what the server learns of it."""

from fedtail.channel.base import Channel, RoundLost
from fedtail.channel.graph import SignedGraph, SparseGraph
from fedtail.channel.integer import FixedPoint, IntegerChannel
from fedtail.channel.plain import PlainChannel
from fedtail.channel.secure import SecureChannel

__all__ = ["Channel", "FixedPoint", "IntegerChannel", "PlainChannel", "RoundLost", "SecureChannel", "SignedGraph", "SparseGraph"]
