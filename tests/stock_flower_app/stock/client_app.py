"""Each node has a number it wants, in a file; its loss is half the squared distance."""

import json
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def data(context: Context):
    return json.loads((Path(str(context.node_config["settings"])).parent / "wanted.json").read_text())


@app.train()
def train(message: Message, context: Context) -> Message:
    w, here = message.content["arrays"]["w"].numpy(), data(context)
    arrays = ArrayRecord({"w": Array(w + 0.5 * (here["target"] - w))})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": here["examples"]})}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    w, here = float(message.content["arrays"]["w"].numpy()[0]), data(context)
    metrics = MetricRecord({"eval_loss": (w - here["target"]) ** 2 / 2, "num-examples": here["examples"]})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
