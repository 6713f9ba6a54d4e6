"""Sends back what came, in reverse."""

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("letter")
def reverse(message: Message, context: Context) -> Message:
    content = message.content.config_records["fedtail"]["letter"]
    return Message(RecordDict({"fedtail": ConfigRecord({"reply": content[::-1]})}), reply_to=message)
