"""The ClientApp of a node. Every message starts a process: what survives is in `context.state`, and torch is imported late."""

from __future__ import annotations

from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context, Message, RecordDict

from fedtail.deployment.settings import NodeSettings

app = ClientApp()


@app.query("letter")
def letter(message: Message, context: Context) -> Message:
    """A letter of the run: see `fedtail.deployment.Site`."""
    settings = NodeSettings.read(str(context.node_config["settings"]))
    site = settings.site(int(context.run_config.get("seed", 0)))
    if "fedtail" in context.state:
        site.recall(content(context.state, "site"))
    reply = site.handle(content(message.content, "letter"))
    context.state["fedtail"] = ConfigRecord({"site": site.save()})
    return Message(RecordDict({"fedtail": ConfigRecord({"reply": reply})}), reply_to=message)


@app.query("who")
def who(message: Message, context: Context) -> Message:
    """Who is here: the node's name, and its clients' keys, masses and groups."""
    from fedtail.deployment.who import who_is_here

    about = who_is_here(NodeSettings.read(str(context.node_config["settings"])))
    return Message(RecordDict({"fedtail": ConfigRecord({"who": about})}), reply_to=message)


def content(records: RecordDict, name: str) -> bytes:
    """Bytes in one of our records; anything else is refused."""
    value = records.config_records["fedtail"][name]
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, got {type(value).__name__}.")
    return value
