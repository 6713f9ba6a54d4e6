"""The ClientApp of a node. Every message starts a process: its state is sealed in `context.state`, and torch imported late."""

from __future__ import annotations

import time

from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context, Message, RecordDict

from fedtail.deployment.flower.sealed_state import HOME, SealedState
from fedtail.deployment.settings import NodeSettings
from fedtail.secure.encoding import Refused

app = ClientApp()


@app.query("letter")
def answer_message(message: Message, context: Context) -> Message:
    """The reply to one message of a run by this node's `Site`, which is restored from `context.state` and saved there again.

    The state is sealed, because Flower hands it on. A state that is not the last one is refused, as the audit log says, and the
    node goes on as after a restart. The settings are read from the file that the node's configuration names, at every message.
    """
    began = time.monotonic()
    settings = NodeSettings.read(str(context.node_config["settings"]))
    sealed = SealedState(settings.folder / HOME, settings.name, context.run_id)

    def store_state(saved: bytes) -> None:
        """Store the node's saved state in the context, from which Flower gives it to the process of the next message."""
        context.state["fedtail"] = ConfigRecord({"site": sealed.seal(saved)})

    site = settings.make_site(int(context.run_config.get("seed", 0)))
    try:
        saved = sealed.open(bytes_from_records(context.state, "site") if "fedtail" in context.state else b"")
    except (Refused, TypeError, KeyError) as why:
        saved = b""
        settings.audit_log().write_once("refused", why=str(why))
    if saved:
        site.restore(saved)
    content = bytes_from_records(message.content, "letter")
    reply = site.handle(content, began, store_state)
    return Message(RecordDict({"fedtail": ConfigRecord({"reply": reply})}), reply_to=message)


@app.query("who")
def reply_with_node_info(message: Message, context: Context) -> Message:
    """Reply to `message` with the signed node info: the node's name, and its clients' keys, masses and groups.

    Reads the node's data, which the configuration in `context` names; the message holds the request, with the
    challenge that is signed with it.
    """
    from fedtail.deployment.registry import signed_node_info

    settings = NodeSettings.read(str(context.node_config["settings"]))
    about = signed_node_info(settings, bytes_from_records(message.content, "ask"))
    return Message(RecordDict({"fedtail": ConfigRecord({"who": about})}), reply_to=message)


def bytes_from_records(records: RecordDict, name: str) -> bytes:
    """The bytes called `name` in the config record "fedtail"; TypeError if it is not bytes, KeyError if missing."""
    value = records.config_records["fedtail"][name]
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, got {type(value).__name__}.")
    return value
