"""FedJAX: `federated_averaging` over in-memory clients; the models are written again in Haiku, with the same shapes.

`--threads 1` is its jit backend with XLA's operations kept to one thread, `--threads 2` the same with XLA's own threads,
`--devices 2` its pmap backend on two host devices, the way FedJAX runs clients in parallel.
What differs: Haiku draws its own start (W3 to W6), and images are (height, width, channel), which JAX prefers. Every size
of last batch is compiled once; `warm` does it before the clock.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from laps import Laps, arguments

given, workload = arguments(devices={"type": int, "default": 1})
threads = f"--xla_cpu_multi_thread_eigen={'true' if given.threads > 1 else 'false'} intra_op_parallelism_threads={given.threads}"
os.environ["XLA_FLAGS"] = f"{threads} --xla_force_host_platform_device_count={given.devices}"

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from workloads import EVALUATION_BATCH, Data, load


def linear(batch):
    return hk.Linear(workload.classes, w_init=jnp.zeros)(batch["x"])


def convnet(batch):
    hidden = batch["x"]
    for channels in (32, 64):
        hidden = hk.Conv2D(channels, 5, padding="VALID")(hidden)
        hidden = jax.nn.relu(hk.max_pool(hidden, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    return hk.Linear(62)(hk.Flatten()(hidden))


def recurrent(batch):
    core = hk.LSTM(50)
    states, _ = hk.dynamic_unroll(core, batch["x"], core.initial_state(batch["x"].shape[0]), time_major=False)
    return hk.Linear(2)(states[:, -1])


def resnet18(batch):
    hidden = jax.nn.relu(hk.GroupNorm(2)(hk.Conv2D(64, 3, with_bias=False)(batch["x"])))
    for channels in (64, 128, 256, 512):
        for place in range(2):
            stride = 2 if place == 0 and channels > 64 else 1
            branch = jax.nn.relu(hk.GroupNorm(2)(hk.Conv2D(channels, 3, stride, with_bias=False)(hidden)))
            branch = hk.GroupNorm(2)(hk.Conv2D(channels, 3, with_bias=False)(branch))
            if stride == 2:
                hidden = hk.GroupNorm(2)(hk.Conv2D(channels, 1, stride, with_bias=False)(hidden))
            hidden = jax.nn.relu(hidden + branch)
    return hk.Linear(100)(hidden.mean((1, 2)))


FORWARD = {"W1": linear, "W2": linear, "W3": convnet, "W4": recurrent, "W5": convnet, "W6": resnet18}


def clients_of(data: Data) -> fedjax.InMemoryFederatedData:
    images = len(workload.shape) == 3
    return fedjax.InMemoryFederatedData({
        k: {"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if images else x, "y": y.astype(np.int32)}
        for k, (x, y) in enumerate(data.clients())})


def model_of(sample) -> fedjax.Model:
    return fedjax.create_model_from_haiku(
        hk.transform(FORWARD[workload.name]), sample,
        train_loss=lambda batch, outputs: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs),
        eval_metrics={"loss": fedjax.metrics.CrossEntropyLoss(), "accuracy": fedjax.metrics.Accuracy()})


class Rounds:
    """Rounds of the workload with FedJAX's own parts."""

    def __init__(self, federation: fedjax.InMemoryFederatedData):
        self.federation = federation
        _, first = next(iter(federation.clients()))
        self.model = model_of(first[:2].all_examples())
        self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            fedjax.model_grad(self.model), fedjax.optimizers.sgd(workload.rate), fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(workload.batch or len(first), num_epochs=1, seed=0))
        self.evaluator = fedjax.ModelEvaluator(self.model)
        self.state = self.algorithm.init(self.model.init(jax.random.PRNGKey(0)))
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(federation, workload.cohort, seed=0)

    def warm(self) -> None:
        """Compile for every size that a last batch can have; the state does not move."""
        if workload.evaluation:
            list(self._evaluated(list(self.federation.clients())[:2]))
            return
        sizes = {size % (workload.batch or size): k for k, size in self.federation.client_sizes()}
        few = [(k, self.federation.get_client(k), jax.random.PRNGKey(0)) for k in sizes.values()]
        jax.block_until_ready(self.algorithm.apply(self.state, [*few, *few][: max(2, len(few))])[0].params)

    def one(self) -> None:
        if workload.evaluation:
            list(self._evaluated(self.federation.clients()))
            return
        cohort = self.sampler.sample()
        if workload.losses:
            list(self._evaluated([(k, client) for k, client, _ in cohort]))
        self.state, _ = self.algorithm.apply(self.state, cohort)
        jax.block_until_ready(self.state.params)

    def judged(self) -> float:
        """As `workloads.judged`: the mean loss over the examples of the first ten clients."""
        clients = [self.federation.get_client(k) for k in range(10)]
        losses = [float(m["loss"]) for _, m in self._evaluated(list(enumerate(clients)))]
        return float(np.average(losses, weights=[len(client) for client in clients]))

    def _evaluated(self, clients):
        batches = ((k, client.padded_batch(batch_size=EVALUATION_BATCH)) for k, client in clients)
        return jax.block_until_ready(list(self.evaluator.evaluate_global_params(self.state.params, batches)))


def main() -> None:
    laps, backend = Laps(given.rounds), "pmap" if given.devices > 1 else "jit"
    fedjax.set_for_each_client_backend(backend)
    rounds = Rounds(clients_of(load(workload)))
    rounds.warm()
    laps.start()
    for _ in range(given.rounds):
        rounds.one()
        laps.lap()
    laps.done(rounds.judged(), backend=backend)


if __name__ == "__main__":
    main()
