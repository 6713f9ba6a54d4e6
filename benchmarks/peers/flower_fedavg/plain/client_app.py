"""A ClientApp that trains the model that it is sent on its node's data."""

import sys
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    sys.path.insert(0, str(context.run_config["work"]))
    import node_work

    model = node_work.module()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    clients = node_work.read_clients(Path(str(context.node_config["settings"])).parent / "data.npz")
    examples = node_work.train(model, clients, int(message.content["config"]["server-round"]))
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": examples})}),
                   reply_to=message)
