"""The ClientApp of a node. Every message starts a process: the state is in `context.state`, and torch is imported late."""

from __future__ import annotations

import time

from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context, Message, RecordDict

from fedtail.deployment.settings import NodeSettings

app = ClientApp()


@app.query("letter")
def answer(message: Message, context: Context) -> Message:
    """Answer a message of the run: see `fedtail.deployment.Site`."""
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
    """The node info: the node's name, and its clients' keys, masses and groups."""
    from fedtail.deployment.registry import node_info

    about = node_info(NodeSettings.read(str(context.node_config["settings"])))
    return Message(RecordDict({"fedtail": ConfigRecord({"who": about})}), reply_to=message)


def content(records: RecordDict, name: str) -> bytes:
    """Bytes in one of our records; anything else is refused."""
    value = records.config_records["fedtail"][name]
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, got {type(value).__name__}.")
    return value
