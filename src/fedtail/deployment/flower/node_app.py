"""The ClientApp of a node. Every message starts a process: the state is in `context.state`, and torch is imported late."""

from __future__ import annotations

import time

from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context, Message, RecordDict

from fedtail.deployment.settings import NodeSettings

app = ClientApp()


@app.query("letter")
def answer(message: Message, context: Context) -> Message:
    """Answer a message of the run with the node's `Site`, whose state is kept in `context.state` between messages."""
    began = time.monotonic()

    def keep(saved: bytes) -> None:
        context.state["fedtail"] = ConfigRecord({"site": saved})

    settings = NodeSettings.read(str(context.node_config["settings"]))
    site = settings.site(int(context.run_config.get("seed", 0)))
    if "fedtail" in context.state:
        site.recall(content(context.state, "site"))
    reply = site.handle(content(message.content, "letter"), began, keep)
    return Message(RecordDict({"fedtail": ConfigRecord({"reply": reply})}), reply_to=message)


@app.query("who")
def info(message: Message, context: Context) -> Message:
    """Reply with the node info: the node's name, and its clients' keys, masses and groups."""
    from fedtail.deployment.registry import node_info

    about = node_info(NodeSettings.read(str(context.node_config["settings"])))
    return Message(RecordDict({"fedtail": ConfigRecord({"who": about})}), reply_to=message)


def content(records: RecordDict, name: str) -> bytes:
    """The bytes called `name` in the fedtail record; TypeError for anything but bytes."""
    value = records.config_records["fedtail"][name]
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, got {type(value).__name__}.")
    return value
