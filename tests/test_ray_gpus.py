"""One actor for each GPU: Ray is asked for a whole one and gives each actor another, which alone it sees. No GPU is needed:
this Ray is told of two, and actors that were given one compute on cores."""

from __future__ import annotations

import pytest
import torch

import fedtail
from fedtail import Task, train
from fedtail.engine.blocks import cut_into_blocks
from fedtail.errors import FieldError

from cases import small_population

ray = pytest.importorskip("ray")

from fedtail.engine.ray import RayFleet, cluster, ray_fleet  # noqa: E402
from fedtail.engine.ray.ray_fleet import actor_resources  # noqa: E402
from fedtail.engine.ray.shard_actor import GpusSeen, ShardActor, check_own_gpu  # noqa: E402

POPULATION = small_population()
METHOD = fedtail.delta_fl(0.4, 8, learning_rate=0.2, batch_size=4)


@pytest.fixture(scope="module")
def two_gpus():
    """A Ray that believes this machine has two GPUs."""
    leave = cluster.join_ray(None, cores=2, memory=0, gpus=2)
    yield
    leave()


@pytest.fixture
def on_cores(monkeypatch):
    """Actors that keep the GPU that Ray gave them, and compute on cores."""
    class OnCores(ShardActor):
        """An actor of the fleet but for the device."""

        def __init__(self, low, high, settings):
            """Check what this process sees as on a machine where PyTorch finds what CUDA shows, then take the CPU."""
            assert settings["device"] == "cuda"
            seen = self.gpus()
            check_own_gpu(seen._replace(found=len(seen.shown)))
            super().__init__(low, high, {**settings, "device": "cpu"})

    monkeypatch.setattr(ray_fleet, "ShardActor", OnCores)


def task() -> Task:
    """A small module, as it comes from a fixed seed."""
    torch.manual_seed(0)
    return Task(fedtail.models.SoftmaxRegression(POPULATION.inputs.shape[1], int(POPULATION.targets.max()) + 1))


def test_every_actor_has_a_gpu_of_its_own_and_the_model_is_that_of_the_local_engine(two_gpus, on_cores):
    model = task()
    with RayFleet(POPULATION, model, device="cuda") as fleet:
        there = train(METHOD, model, fleet=fleet, rounds=3, seed=5)
        seen = [GpusSeen(*ray.get(handle.actor.gpus.remote())) for handle in fleet._handles]
        assert [handle.block for handle in fleet._handles] == cut_into_blocks(POPULATION.size, 2)      # one for each GPU
        assert ray.available_resources().get("GPU", 0) == 0
    here = train(METHOD, model, POPULATION, rounds=3, seed=5)
    assert sorted(one.given for one in seen) == [["0"], ["1"]]
    assert all(one.shown == one.given for one in seen)
    assert torch.allclose(there.state.params, here.state.params, atol=1e-6)


def test_what_is_asked_of_ray_is_a_whole_gpu_or_none():
    machine = {"CPU": 16.0, "GPU": 4.0}
    assert actor_resources("cuda", 4, machine, alone=True) == {"num_cpus": 0.0, "num_gpus": 1}
    assert actor_resources("cuda", 4, machine, alone=False) == {"num_cpus": 1.0, "num_gpus": 1}
    assert actor_resources("cpu", 32, machine, alone=False) == {"num_cpus": 0.5, "num_gpus": 0}


def test_more_actors_than_gpus_are_refused(two_gpus):
    with RayFleet(POPULATION, task(), shards=3, device="cuda") as fleet, pytest.raises(ValueError, match=r"3 shards need a GPU each, and this Ray has 2\. Write shards=2"):
        train(METHOD, task(), fleet=fleet, rounds=1)


def test_an_actor_without_a_gpu_that_pytorch_finds_says_so(two_gpus):
    if torch.cuda.device_count():
        pytest.skip("there are GPUs here")
    with RayFleet(POPULATION, task(), shards=1, device="cuda") as fleet, pytest.raises(Exception, match="PyTorch finds 0"):
        train(METHOD, task(), fleet=fleet, rounds=1)


@pytest.mark.parametrize("seen", [GpusSeen([], [], 0), GpusSeen(["0"], ["0", "1"], 2), GpusSeen(["0"], ["1"], 1), GpusSeen(["0", "1"], ["0", "1"], 2)])
def test_another_gpu_than_its_own_is_refused(seen):
    check_own_gpu(GpusSeen(["1"], ["1"], 1))
    with pytest.raises(RuntimeError, match="an actor must see one GPU, that of its own"):
        check_own_gpu(seen)


@pytest.mark.parametrize("device", ["cuda:1", "gpu", "mps"])
def test_other_devices_are_refused(device):
    with pytest.raises(FieldError, match=r"shards=1"):
        RayFleet(POPULATION, task(), device=device)
