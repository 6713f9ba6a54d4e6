"""On a machine with a GPU, from source, with torch and numpy alone: `python tests/gpu_check.py`.

Every recipe gives the same model on the GPU as on the CPU, over plain and integer channels; stacked convolutions are torch's,
recorded steps the plain ones, and what cannot be recorded is computed without; LSTMs and GRUs are stacked and recorded; clients are
fine-tuned alike wherever their examples lie; losses of a batch wait for nothing. Exits with 1 if something does not agree.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch
from torch import nn
from torch.func import grad, vjp, vmap
from torch.nn import functional as F

import fedtail
from fedtail.data.arrays import input_tensors, inputs_to_device, select_rows
from fedtail.engine.gpu.convolutions import FlatOperations, StackedOperations
from fedtail.engine.gpu.cuda_graphs import Replayed
from fedtail.engine.gpu.precision import use_precision
from fedtail.engine.kernel_choice import kernel_for
from fedtail.engine.local_fleet import LocalFleet
from fedtail.engine.stacked import StackedGradients, StackedKernel
from fedtail.models import CharacterGRU, ConvNet, LSTMClassifier, SoftmaxRegression
from fedtail.modules import cast_inputs

RECIPES = {
    "fedavg": fedtail.fedavg(10),
    "delta_fl": fedtail.delta_fl(0.5, 10),
    "delta_fl smoothed": fedtail.delta_fl(0.5, 10, form="smoothed"),
    "q_ffl": fedtail.q_ffl(1.0, 10),
    "q_maml": fedtail.q_maml(1.0, 10, inner_steps=2),
    "term": fedtail.term(1.0, 10),
    "afl": fedtail.afl(0.1),
    "afl groups": fedtail.afl(0.1, groups=3, cohort_size=10),
    "family": fedtail.delta_fl_family((1.0, 0.5), 10),
}


def population(shape: tuple[int, ...]) -> fedtail.Population:
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(20, 60, (30,), generator=random).tolist()
    pairs = [(torch.randn(n, *shape, generator=random), torch.randint(0, 5, (n,), generator=random)) for n in sizes]
    return fedtail.Population.from_clients(pairs, group=torch.arange(30) % 3)


def params_of(trained: fedtail.Trained) -> torch.Tensor:
    states = trained.state if isinstance(trained.state, tuple) else (trained.state,)
    return torch.cat([s.params.cpu() for s in states])


class Looking(nn.Module):
    """Brings a number to the host, which a recording does not let it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(20, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) * float(self.scale)


CONVOLUTIONS = {      # kernel, stride, padding, dilation, image, channels in and out
    "plain": ((5, 5), 1, 0, 1, (12, 12), 32, 64), "all of it": ((3, 2), (2, 1), (1, 2), (1, 2), (9, 11), 2, 3),
    "a point": ((1, 1), 1, 0, 1, (4, 5), 2, 6), "dilated": ((3, 3), 2, 1, 2, (11, 10), 1, 5),
}


def convolutions_agree() -> bool:
    """Stacked convolutions and pooling, with their gradients, against vmap's own; ties and numbers that are none too."""
    good = True
    for name, (kernel, stride, padding, dilation, size, before, after) in CONVOLUTIONS.items():
        torch.manual_seed(0)
        given = [torch.randn(*shape, dtype=torch.float64, device="cuda") for shape in
                 ((3, 4, before, *size), (3, after, before, *kernel), (3, after))]

        def total(x, w, b, stride=stride, padding=padding, dilation=dilation):
            y = F.conv2d(x, w, b, stride, padding, dilation)
            return (F.max_pool2d(y, 2) if min(y.shape[2:]) > 1 else y).sin().sum()

        for place in range(3):
            expected = vmap(grad(total, place))(*given)
            with StackedOperations():
                gap = (vmap(grad(total, place))(*given) - expected).abs().max().item() / expected.abs().max().item()
            good &= gap < 1e-12
        with torch.no_grad():
            plain = F.conv2d(given[0][0], given[1][0], given[2][0], stride, padding, dilation)
            with FlatOperations():
                flat = (F.conv2d(given[0][0], given[1][0], given[2][0], stride, padding, dilation) - plain).abs().max().item()
        good &= flat < 1e-11
        print(f"convolution {name:12} {gap:.1e}  flat {flat:.1e}")
    tied = torch.randint(0, 3, (3, 4, 5, 9, 7), device="cuda").float()
    tied[0, 0, 0, 0, 0] = float("nan")
    pooled = grad(lambda x: F.max_pool2d(x, (2, 3)).nan_to_num(5).square().sum())
    expected = vmap(pooled)(tied)
    with StackedOperations():
        return good and torch.equal(vmap(pooled)(tied), expected)


def products_are_exact() -> bool:
    """Stacked convolutions of float32 and their gradients in each precision, relative to float64 in the Euclidean norm.

    In full precision 1e-5: ours are off by up to 3e-7, cuDNN's own by up to 4e-6. In TF32 5e-4: a factor rounded to ten bits is
    off by 2.1e-4 in the root mean square, a product by 2.9e-4; one of factors that are cut off instead by 7.7e-4, all towards zero.
    """
    good, card = True, torch.device("cuda")
    for name, (kernel, stride, padding, dilation, size, before, after) in CONVOLUTIONS.items():
        torch.manual_seed(0)
        images, weight, bias = (torch.randn(*shape, device=card) for shape in
                                ((3, 16, before, *size), (3, after, before, *kernel), (3, after)))

        def convolved(x, w, b, stride=stride, padding=padding, dilation=dilation):
            return F.conv2d(x, w, b, stride, padding, dilation)

        def with_slopes(x, w, b, slopes, convolved=convolved):
            outputs, back = vjp(convolved, x, w, b)
            return (outputs, *back(slopes))

        slopes = torch.randn_like(vmap(convolved)(images, weight, bias))
        given = (images, weight, bias, slopes)
        exact = vmap(with_slopes)(*(t.double() for t in given))
        for precision, bound in (("full", 1e-5), ("tf32", 5e-4)):
            with use_precision(precision, card):
                with StackedOperations():
                    found = vmap(with_slopes)(*given)
                with torch.no_grad(), FlatOperations():
                    flat = torch.stack([convolved(*one) for one in zip(images, weight, bias, strict=True)])
            gaps = [((one.double() - other).norm() / other.norm()).item()
                    for one, other in zip((*found, flat), (*exact, exact[0]), strict=True)]
            good &= max(gaps) < bound
            print(f"products {name:12} {precision:5} outputs {gaps[0]:.1e}, gradients {', '.join(f'{g:.1e}' for g in gaps[1:4])}, "
                  f"flat {gaps[4]:.1e}")
    return good and _none_stay_none(card)


def _none_stay_none(card: torch.device) -> bool:
    """Rounding keeps infinities, and what is not a number whatever its bits."""
    images, weight = torch.ones(1, 2, 4, 4, device=card), torch.ones(3, 2, 2, 2, device=card)
    kept = []
    for bits in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000):
        images[0, 0, 0, :1].view(torch.int32).fill_(bits)
        with torch.no_grad(), use_precision("tf32", card), FlatOperations():
            outputs = F.conv2d(images, weight)[0, :, 0, 0]
        kept.append(bool(outputs.isinf().all() if bits == 0x7F800000 else outputs.isnan().all()))
    return all(kept)


def recordings_agree(images: fedtail.Population) -> bool:
    """Recorded steps against the same function called plainly; memory is given back; what cannot be recorded still trains."""
    task, card = fedtail.Task(ConvNet(classes=5)), torch.device("cuda")
    held = torch.cuda.memory_allocated()
    kernel = StackedKernel(task, card, torch.float64)
    function, good = StackedGradients(kernel.training, task.loss, "full", card), True
    for active, batch in ((9, 16), (9, 16), (9, 16), (7, 16), (7, 16), (7, 16), (3, 5), (3, 5), (3, 5)):
        rows = torch.randint(0, len(images.targets), (active, batch))
        params = task.params().double().to(card) + 0.01 * torch.randn(active, kernel.dim, device=card, dtype=torch.float64)
        step = (params, images.inputs[rows].double().to(card), images.targets[rows].to(card),
                torch.full((active, batch), 1 / batch, device=card, dtype=torch.float64))
        good &= torch.allclose(kernel.gradients(*step), function(*step), rtol=1e-9, atol=1e-12)
    assert isinstance(kernel._gradients, Replayed)
    recorded = len(kernel._gradients)
    del kernel, function, step, params
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - held
    print(f"recorded {recorded} shapes, agree: {good}, bytes kept after the kernel went: {kept}")
    return good and recorded == 3 and kept < 2**20


def unrecorded_agree(flat: fedtail.Population) -> bool:
    task = fedtail.Task(Looking(), buffers="frozen")
    kernel = StackedKernel(task, torch.device("cuda"), torch.float64)
    fleet = LocalFleet(flat, task, "cuda", torch.float64, kernel=kernel)
    there = fedtail.train(RECIPES["fedavg"], task, flat, rounds=3, fleet=fleet, engine=fedtail.Engine(dtype=torch.float64, device="cuda"))
    here = fedtail.train(RECIPES["fedavg"], task, flat, rounds=3, engine=fedtail.Engine(dtype=torch.float64))
    gap = (params_of(there) - params_of(here)).abs().max().item()
    print(f"not recorded ({str(kernel._gradients.refused)[:60]}...) {gap:.1e}")
    return gap < 1e-9 and kernel._gradients.refused is not None


def recurrences_agree(tasks: dict[str, fedtail.Task], tokens: fedtail.Population) -> bool:
    """LSTMs and GRUs of many clients train in recorded steps as on the CPU, one client after the other."""
    good, card = True, torch.device("cuda")
    for name, task in tasks.items():
        kernel = kernel_for(task, card, torch.float64, tokens)
        fleet = LocalFleet(tokens, task, card, torch.float64, kernel=kernel)
        there = fedtail.train(RECIPES["delta_fl"], task, tokens, rounds=2, engine=fedtail.Engine(device="cuda", dtype=torch.float64), fleet=fleet)
        here = fedtail.train(RECIPES["delta_fl"], task, tokens, rounds=2, engine=fedtail.Engine(dtype=torch.float64))
        gap = (params_of(there) - params_of(here)).abs().max().item()
        steps = getattr(kernel, "_gradients", None)
        recorded = isinstance(steps, Replayed) and steps.refused is None and len(steps) > 0
        print(f"{name:8} delta_fl {gap:.1e}, kernel {kernel.name}, recorded: {recorded}")
        good &= gap < 1e-9 and recorded
    return good


def splits_agree(people: fedtail.Population) -> bool:
    """Examples on the GPU are split as those on the CPU are, and stay there."""
    pairs = list(zip(people.split_examples(within=0.6, seed=3), people.to("cuda").split_examples(within=0.6, seed=3), strict=True))
    return all(there.targets.is_cuda and torch.equal(here.start, there.start) and torch.equal(here.mass, there.mass)
               and all(torch.equal(a, b.cpu()) for a, b in zip((*input_tensors(here.inputs), here.targets),
                                                               (*input_tensors(there.inputs), there.targets), strict=True))
               for here, there in pairs)


def fine_tuning_agrees(cases: dict[str, tuple[fedtail.Task, fedtail.Population]]) -> bool:
    """Clients tuned side by side on the GPU, their examples on the CPU or there, against the CPU."""
    good, local = True, fedtail.LocalSGD(0.05, 8, epochs=3, momentum=0.5)
    for name, (task, people) in cases.items():
        here, there, all_there = (fedtail.finetune(task.module, lying, local, task, engine=fedtail.Engine(device=device, dtype=torch.float64))
                                  for lying, device in ((people, "cpu"), (people, "cuda"), (people.to("cuda"), "cuda")))
        gaps = [(other.after.loss.values - here.after.loss.values).abs().max().item() for other in (there, all_there)]
        moved = (here.after.loss.values - here.before.loss.values).abs().max().item()
        print(f"fine-tuning {name:8} {gaps[0]:.1e}, examples on the GPU {gaps[1]:.1e}; a loss moves by up to {moved:.1e}")
        good &= max(gaps) < 1e-8 < moved and splits_agree(people)
    return good


def precisions_differ_little(task: fedtail.Task, people: fedtail.Population) -> bool:
    """One stacked gradient in each precision against float64; torch's flags are given back.

    In full precision 1e-5, as for single products. In narrower ones another number can be the largest of a window that is pooled,
    and its whole gradient goes elsewhere: that is most of a ConvNet's gap, 0.008 in TF32 and 0.03 in bfloat16.
    """
    card = torch.device("cuda")
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    rows = torch.arange(9 * 16).view(9, 16)

    def gradient(precision, dtype: torch.dtype) -> torch.Tensor:
        weight = torch.full((9, 16), 1 / 16, device=card, dtype=dtype)
        inputs = inputs_to_device(cast_inputs(select_rows(people.inputs, rows), dtype), card)
        step = (task.params().to(card, dtype).expand(9, -1), inputs, people.targets[rows].to(card), weight)
        return StackedKernel(task, card, dtype, precision).gradients(*step).double()

    exact = gradient("full", torch.float64)
    gaps = [((gradient(p, torch.float32) - exact).norm() / exact.norm()).item() for p in ("full", "tf32", "bf16")]
    print(f"relative to float64, a gradient of {type(task.module).__name__} is off by " + ", ".join(f"{gap:.1e}" for gap in gaps) + " in full, tf32 and bf16")
    given_back = flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return gaps[0] - 1e-6 < gaps[1] < gaps[2] and gaps[0] < 1e-5 and gaps[1] < 0.02 and gaps[2] < 0.1 and given_back


def single_examples_agree(tasks: dict[str, fedtail.Task], flat: fedtail.Population) -> bool:
    """Losses and gradients of single examples, here and there."""
    good = True
    for name, task in tasks.items():
        inputs, targets = flat.client(0)
        found = []
        for device in (torch.device("cpu"), torch.device("cuda")):
            kernel = kernel_for(task, device, torch.float64, flat, "closed" if name == "linear" else "stacked")
            params = task.params().to(device, torch.float64) + 0.1
            given = inputs.to(device, torch.float64), targets.to(device)
            found.append((kernel.losses(params[None], given[0][None], given[1][None]).cpu(), kernel.example_gradients(params, *given).cpu()))
        gaps = [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]
        print(f"single examples {name:8} losses {gaps[0]:.1e} gradients {gaps[1]:.1e}")
        good &= max(gaps) < 1e-9
    return good


def losses_agree() -> bool:
    """Risks as losses of a batch: as on the CPU, with no wait for the device, and compiled to one graph."""
    good, random = True, torch.Generator().manual_seed(0)
    losses, group = torch.rand(500, generator=random), torch.randint(7, (500,), generator=random)
    tilted = fedtail.Tilted(-1e-6)
    cases = {"tilted": (fedtail.RiskLoss(tilted), ()), "superquantile": (fedtail.RiskLoss(fedtail.Superquantile(0.3)), ()),
             "groups": (fedtail.RiskLoss(fedtail.Hierarchical(fedtail.Superquantile(0.5), fedtail.Tilted(2.0))), (group,)),
             "running": (fedtail.RunningTiltedLoss(2.0), ())}
    for name, (loss, rest) in cases.items():
        def found(call, device, rest=rest):
            given = losses.detach().to(device).requires_grad_()
            call(given, *(one.to(device) for one in rest)).backward()
            torch.cuda.synchronize()
            return given.grad.cpu()
        here = found(loss, "cpu")
        loss, there = loss.to("cuda"), losses.cuda().requires_grad_()
        others = [one.cuda() for one in rest]
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss(there, *others)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gaps = [(found(call, "cuda") - here).abs().max().item() for call in (loss, torch.compile(loss, fullgraph=True))]
        good = good and max(gaps) < 1e-5
        print(f"losses   {name:20} {gaps[0]:.1e}, compiled {gaps[1]:.1e}")
    return good


def main() -> int:
    warnings.simplefilter("ignore", fedtail.SmallTailWarning)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    unwanted = [m for m in ("scipy", "sklearn", "pyarrow", "msgpack", "typer", "rich") if m in sys.modules]
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    worst, flat = 0.0, population((20,))
    for kind, module in (("linear", SoftmaxRegression(20, 5)), ("mlp", mlp)):
        for name, recipe in RECIPES.items():
            here = params_of(fedtail.train(recipe, fedtail.Task(module), flat, rounds=3, engine=fedtail.Engine(dtype=torch.float64)))
            for channel in (fedtail.PlainChannel(), fedtail.IntegerChannel()):
                there = fedtail.train(recipe, fedtail.Task(module), flat, rounds=3, engine=fedtail.Engine(dtype=torch.float64, device="cuda"), channel=channel)
                gap = (params_of(there) - here).abs().max().item()
                worst = max(worst, gap)
                print(f"{kind:8} {name:20} {type(channel).__name__:16} {gap:.1e}")
    images = population((1, 28, 28))
    conv = fedtail.Task(ConvNet(classes=5))
    runs = [params_of(fedtail.train(RECIPES["delta_fl"], conv, images, rounds=2, engine=fedtail.Engine(device=d, dtype=torch.float64))) for d in ("cpu", "cuda")]
    print(f"convnet  delta_fl {(runs[0] - runs[1]).abs().max().item():.1e}")
    tokens = fedtail.Population.from_clients(
        [({"sequence": (x[:, :6].abs() * 5).long().clamp(max=9), "lengths": (x[:, 6].abs() * 5).long().clamp(max=6)}, y) for x, y in
         (flat.client(k) for k in range(30))])
    recurrent = {"lstm": fedtail.Task(LSTMClassifier((10, 4), hidden=8, classes=5)), "gru": fedtail.Task(CharacterGRU(10, hidden=8))}
    tuned = {"linear": (fedtail.Task(SoftmaxRegression(20, 5)), flat), "mlp": (fedtail.Task(mlp), flat), "convnet": (conv, images),
             **{name: (task, tokens) for name, task in recurrent.items()}}
    drop = fedtail.Task(nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.3), nn.Linear(16, 5)))
    same = [params_of(fedtail.train(RECIPES["delta_fl"], drop, flat, rounds=2, engine=fedtail.Engine(device="cuda"))) for _ in range(2)]
    reports = [fedtail.evaluate(mlp, flat, engine=fedtail.Engine(device=d)).loss.values for d in ("cpu", "cuda")]
    print(f"evaluation {(reports[0] - reports[1]).abs().max().item():.1e}; dropout twice the same: {torch.equal(*same)}")
    paths = [losses_agree(), single_examples_agree({"linear": fedtail.Task(SoftmaxRegression(20, 5)), "mlp": fedtail.Task(mlp)}, flat), convolutions_agree(), products_are_exact(), recordings_agree(images), unrecorded_agree(flat),
             recurrences_agree(recurrent, tokens), fine_tuning_agrees(tuned), precisions_differ_little(conv, images),
             *(precisions_differ_little(task, tokens) for task in recurrent.values())]
    print(f"losses, single examples, convolutions, products, recordings, no recordings, recurrences, fine-tuning, precisions: {paths}")
    good = (all(paths) and worst < 1e-5 and torch.equal(*same) and not unwanted and torch.allclose(*reports, atol=1e-5)
            and torch.allclose(*runs, atol=1e-5))
    print("all agree" if good else f"DISAGREEMENT (imported beside torch and numpy: {unwanted})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
