"""Risks as losses of a torch loop: against the risks in float64, finite differences, the printed algorithm, and in other people's loops."""

from __future__ import annotations

import copy
import io
import math
import pickle

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx
from scipy.optimize import minimize_scalar
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fedtail
from fedtail import Hierarchical, Mean, RiskLoss, RunningTiltedLoss, Spectral, Superquantile, Tilted, Worst

SHORT = [Mean(), Worst(), Tilted(2.0), Tilted(-3.0), Tilted(0.0), Superquantile(0.3), Superquantile(1.0), Superquantile(1e-3),
         Spectral((1.0, 0.1), (0.5, 0.5))]
LEVELS = [Hierarchical(Tilted(-2.0), Tilted(3.0)), Hierarchical(Tilted(1e-8), Tilted(-1e-8)), Hierarchical(Mean(), Worst()),
          Hierarchical(Worst(), Mean()), Hierarchical(Superquantile(0.3), Superquantile(0.5)), Hierarchical(Tilted(0.0), Spectral((1.0, 0.1), (0.5, 0.5))),
          Hierarchical(Tilted(-math.inf), Tilted(2.0)), Hierarchical(fedtail.InverseSuperquantile(0.3), Tilted(2.0))]
OTHERS = [fedtail.ValueAtRisk(0.3), fedtail.InverseSuperquantile(0.3), fedtail.SmoothedSuperquantile(0.3, 0.1),
          fedtail.EntropicValueAtRisk(0.3), fedtail.TailFilter(0.3)]
TILTS = [sign * size for sign in (1, -1) for size in (1e-25, 1e-8, 1e-5, 1e-3, 0.1, 2.0, 50.0, 1e4, 1e25)]


class Valueless(fedtail.Risk):
    """A risk of one's own with weights in rounds only."""


def name_of(risk) -> str:
    return repr(risk).replace(", loss_bound=None", "").replace(", quantile=ExactQuantile(bits=32)", "")


def value_and_gradient(loss, losses):
    losses = losses.clone().requires_grad_()
    value = loss(losses)
    return value.detach(), torch.autograd.grad(value, losses)[0]


@pytest.mark.parametrize("risk", SHORT, ids=name_of)
@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))      # few different numbers: ties are common
def test_the_loss_is_the_risk_and_its_gradient_the_weights(risk, numbers):
    losses = torch.tensor(numbers, dtype=torch.float64) / 4
    value, gradient = value_and_gradient(RiskLoss(risk), losses)
    assert value.item() == approx(risk.value(losses).item(), abs=1e-12)
    expected = value_and_gradient(risk.value, losses)[1]
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("risk", LEVELS, ids=name_of)
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(-3, 3)), min_size=1, max_size=40))
def test_groups_are_those_of_the_hierarchical_risk(risk, numbers):
    losses = torch.tensor([loss for loss, _ in numbers], dtype=torch.float64) / 4
    group = torch.tensor([1000 * label for _, label in numbers])
    value, gradient = value_and_gradient(lambda given: RiskLoss(risk)(given, group), losses)
    expected, weights = value_and_gradient(lambda given: risk.value(given, group=group), losses)
    assert value.item() == approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient, weights, atol=1e-11, rtol=1e-9)


def test_three_levels():
    risk = Hierarchical(Tilted(-2.0), Hierarchical(Superquantile(0.5), Tilted(3.0)))
    random = torch.Generator().manual_seed(0)
    losses, fine = torch.rand(60, dtype=torch.float64, generator=random), torch.randint(9, (60,), generator=random)
    group = torch.stack([fine, fine // 3])
    found = value_and_gradient(lambda given: RiskLoss(risk)(given, group), losses)
    for one, other in zip(found, value_and_gradient(lambda given: risk.value(given, group=group), losses), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tilt", [1e-8, 1e-3, -2.0, 50.0])
def test_one_tilt_at_both_levels_is_that_of_all_losses_in_float32(tilt):
    random = torch.Generator().manual_seed(0)
    losses, group = torch.rand(200, generator=random), torch.randint(7, (200,), generator=random)
    found = RiskLoss(Hierarchical(Tilted(tilt), Tilted(tilt)))(losses, group)
    assert found.item() == approx(truth(losses, tilt), rel=1e-6)


@pytest.mark.parametrize("risk", OTHERS, ids=name_of)
def test_any_other_risk_is_its_value(risk):
    losses = torch.rand(20, generator=torch.Generator().manual_seed(0))
    value, gradient = value_and_gradient(RiskLoss(risk), losses)
    assert value.item() == approx(risk.value(losses.double()).item(), rel=1e-6)
    torch.testing.assert_close(gradient, value_and_gradient(risk.value, losses.double())[1].float())


def truth(losses: torch.Tensor, tilt: float) -> float:
    """The tilted loss of these numbers, in a hundred digits."""
    with mpmath.workdps(100):
        mean = mpmath.fsum(mpmath.exp(mpmath.mpf(tilt) * mpmath.mpf(float(one))) for one in losses) / len(losses)
        return float(mpmath.log(mean) / mpmath.mpf(tilt))


@pytest.mark.parametrize("tilt", TILTS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_tilted_losses_are_exact_in_float32_for_every_tilt_and_scale(tilt, scale):
    losses = scale * torch.rand(33, generator=torch.Generator().manual_seed(1))
    assert RiskLoss(Tilted(tilt))(losses).dtype == torch.float32
    value, gradient = value_and_gradient(RiskLoss(Tilted(tilt)), losses)
    assert value.item() == approx(truth(losses, tilt), rel=1e-6)
    expected = (tilt * (losses.double() - (losses.max() if tilt > 0 else losses.min()))).softmax(0)
    torch.testing.assert_close(gradient.double(), expected, atol=2e-7, rtol=1e-4)


def test_a_million_losses_in_float32():
    losses = 20 * torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) ** 8
    for risk in (Tilted(3.0), Tilted(1e-6), Superquantile(0.01)):
        value, gradient = value_and_gradient(RiskLoss(risk), losses)
        assert value.item() == approx(risk.value(losses.double()).item(), rel=2e-6)
        assert gradient.double().sum().item() == approx(1, rel=1e-5)


@pytest.mark.parametrize("tilt", [1.0, -1.0, 1e-3, math.inf, -math.inf])
def test_nothing_overflows(tilt):
    losses = torch.tensor([0.0, 1e5, 1e6, 1e6])
    value, gradient = value_and_gradient(RiskLoss(Tilted(tilt)), losses)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient.sum().item() == approx(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("risk", SHORT, ids=name_of)
def test_narrow_losses_are_reduced_in_float32(risk, dtype):
    losses = torch.rand(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = RiskLoss(risk)(losses)
    assert value.dtype == dtype
    assert value.double().item() == approx(risk.value(losses.double()).item(), rel=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("tilt", [2.0, -3.0, 1e-3])
def test_derivatives_of_a_tilted_loss_are_right_to_second_order(tilt):
    losses = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert gradcheck(RiskLoss(Tilted(tilt)), losses)
    assert gradgradcheck(RiskLoss(Tilted(tilt)), losses)


def test_per_sample_transforms_work():
    losses = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for risk in (Tilted(2.0), Superquantile(0.3)):
        mapped = torch.func.vmap(torch.func.grad(RiskLoss(risk)))(losses)
        torch.testing.assert_close(mapped, torch.stack([risk.weights(row) for row in losses]))


class Watched(TorchDispatchMode):
    """Notes the dtypes of all results."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.dtypes |= {one.dtype for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, torch.Tensor)}
        return found


@pytest.mark.parametrize("make", [*(lambda risk=risk: RiskLoss(risk) for risk in SHORT), lambda: RunningTiltedLoss(2.0)],
                         ids=[*map(name_of, SHORT), "running"])
def test_no_number_is_read_on_the_host_and_nothing_is_float64(make):
    losses = torch.rand(32, device="meta", requires_grad=True)      # has no numbers: reading one is an error
    with Watched() as watched:
        value = make().to("meta")(losses)
        value.backward()
    assert losses.grad.shape == (32,)
    assert torch.float64 not in watched.dtypes


@pytest.mark.parametrize("risk", LEVELS[:6], ids=name_of)
def test_groups_read_no_number_on_the_host_and_nothing_is_float64(risk):
    losses, group = torch.rand(32, device="meta", requires_grad=True), torch.zeros(32, dtype=torch.long, device="meta")
    with Watched() as watched:
        RiskLoss(risk)(losses, group).backward()
    assert losses.grad.shape == (32,)
    assert torch.float64 not in watched.dtypes


@pytest.mark.parametrize("make", [*(lambda risk=risk: RiskLoss(risk) for risk in (Tilted(2.0), Superquantile(0.3), Worst())),
                                  lambda: RunningTiltedLoss(-2.0)], ids=["tilted", "superquantile", "worst", "running"])
def test_one_graph_under_compile_for_any_batch_size(make):
    torch._dynamo.reset()
    plain, graphed = make(), make()
    compiled = torch.compile(graphed, fullgraph=True, backend="aot_eager")
    for size in (8, 5, 5, 7):
        losses = torch.rand(size, generator=torch.Generator().manual_seed(size))
        for found, expected in zip(value_and_gradient(compiled, losses), value_and_gradient(plain, losses), strict=True):
            torch.testing.assert_close(found, expected)


def test_groups_are_one_graph_under_compile():
    torch._dynamo.reset()
    risk = Hierarchical(Tilted(-2.0), Superquantile(0.5))
    losses, group = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
    compiled = torch.compile(RiskLoss(risk), fullgraph=True, backend="aot_eager")
    assert compiled(losses, group).item() == approx(risk.value(losses.double(), group=group).item(), rel=1e-6)


class Several(nn.Module):
    """Some losses side by side, (3,)."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([RiskLoss(Tilted(-1e-8)), RiskLoss(Superquantile(0.3)), RunningTiltedLoss(1e-8)])

    def forward(self, losses):
        return torch.stack([part(losses) for part in self.parts])


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")      # torch's own, while it compiles
def test_compiled_by_inductor_with_all_digits():
    torch._dynamo.reset()
    plain, graphed = Several(), Several()
    compiled = torch.compile(graphed, fullgraph=True)
    for size in (128, 100):
        losses = torch.rand(size, generator=torch.Generator().manual_seed(size))
        found, expected = (value_and_gradient(lambda given, loss=loss: (loss(given) ** 2).sum(), losses) for loss in (compiled, plain))
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
        assert graphed.parts[2].estimate.item() == approx(plain.parts[2].estimate.item(), rel=1e-6)


def algorithm_14(batches, tilt, smoothing, estimate):
    """The printed algorithm, in float64 and with plain exponentials: the estimate and weights after each batch."""
    for batch in batches:
        of_batch = math.log(np.mean(np.exp(tilt * batch))) / tilt
        estimate = math.log((1 - smoothing) * math.exp(tilt * estimate) + smoothing * math.exp(tilt * of_batch)) / tilt
        yield estimate, np.exp(tilt * batch - tilt * estimate) / len(batch)


@pytest.mark.parametrize("tilt", [2.0, -1.5, 0.01])
@pytest.mark.parametrize("smoothing", [0.2, 0.9])
def test_the_running_loss_is_the_printed_algorithm(tilt, smoothing):
    random = np.random.default_rng(0)
    data, batches = random.gamma(2, size=50), [random.gamma(2, size=size) for size in (4, 4, 1, 3)]
    running = RunningTiltedLoss(tilt, smoothing).double()
    running.start(torch.tensor(data))
    start = math.log(np.mean(np.exp(tilt * data))) / tilt
    assert running.estimate.item() == approx(start, rel=1e-12)
    for batch, (estimate, weights) in zip(batches, algorithm_14(batches, tilt, smoothing, start), strict=True):
        value, gradient = value_and_gradient(running, torch.tensor(batch))
        assert value.item() == approx(estimate, rel=1e-10)
        assert running.estimate.item() == approx(estimate, rel=1e-10)
        assert gradient.numpy() == approx(weights, rel=1e-9)


def test_the_running_loss_minimises_the_tilted_loss_where_single_examples_cannot():
    points, tilt = torch.tensor([0.0, 0.2, 0.3, 2.0]), 1.5
    best = minimize_scalar(lambda at: Tilted(tilt).value((points.double() - at) ** 2).item(), bounds=(0, 2), method="bounded").x

    def found(criterion) -> float:
        centre, random = torch.zeros(1, requires_grad=True), torch.Generator().manual_seed(0)
        tail = []
        for step in range(2500):
            drawn = points[torch.randint(4, (1,), generator=random)]      # one example a batch
            gradient, = torch.autograd.grad(criterion((drawn - centre) ** 2), centre)
            with torch.no_grad():
                centre -= 0.02 * gradient
            tail += [centre.item()] * (step > 500)
        return float(np.mean(tail))

    assert best > 0.85
    assert found(RunningTiltedLoss(tilt, smoothing=0.05)) == approx(best, abs=0.1)
    assert found(RiskLoss(Tilted(tilt))) == approx(points.mean().item(), abs=0.1)


@pytest.mark.parametrize("tilt", [0.0, 2.0, -2.0])
def test_without_memory_it_is_the_tilted_loss_of_the_batch(tilt):
    running, plain = RunningTiltedLoss(tilt, smoothing=1), RiskLoss(Tilted(tilt))
    for seed in range(3):
        losses = torch.rand(9, generator=torch.Generator().manual_seed(seed))
        for one, other in zip(value_and_gradient(running, losses), value_and_gradient(plain, losses), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tilt", [0.0, 1e-25, 1e-8])
def test_without_a_tilt_the_estimate_is_a_moving_average_and_all_weights_are_equal(tilt):
    running = RunningTiltedLoss(tilt, smoothing=0.25)
    running(torch.tensor([1.0, 3.0]))
    value, gradient = value_and_gradient(running, torch.tensor([4.0, 8.0]))
    assert value.item() == approx(0.75 * 2 + 0.25 * 6)
    assert gradient.tolist() == approx([0.5, 0.5])


@pytest.mark.parametrize("tilt", [1e4, -1e4, 1e25, -1e25])
def test_far_batches_do_not_overflow(tilt):
    running = RunningTiltedLoss(tilt, smoothing=0.5)
    for losses in ([0.0, 1.0], [100.0, 90.0], [0.0, 0.5]):
        value, gradient = value_and_gradient(running, torch.tensor(losses))
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.sum() <= 1 / 0.5 * 1.01
    assert running.estimate.item() == approx(100.0 if tilt > 0 else 0.0, abs=1e-2)


def test_evaluation_leaves_the_estimate():
    running = RunningTiltedLoss(2.0)
    running(torch.tensor([1.0, 2.0]))
    before, losses = running.estimate.item(), torch.tensor([5.0, 6.0])
    assert running.eval()(losses).item() == approx(Tilted(2.0).value(losses).item())
    assert running.estimate.item() == before
    running.train()(losses)
    assert running.estimate.item() > before


def test_a_failed_batch_leaves_the_estimate_and_shows_in_the_loss():
    running = RunningTiltedLoss(2.0)
    running(torch.tensor([1.0, 2.0]))
    before = running.estimate.item()
    for failed in (math.nan, math.inf):
        assert not running(torch.tensor([1.0, failed])).isfinite()
        assert running.estimate.item() == before


def test_an_infinite_loss_has_no_weight_under_a_negative_tilt():
    criterion = RunningTiltedLoss(-1.0, smoothing=0.5)
    criterion(torch.tensor([1.0, 2.0]))
    losses = torch.tensor([1.0, math.inf], requires_grad=True)
    value = criterion(losses)
    value.backward()
    before, batch = (math.exp(-1) + math.exp(-2)) / 2, math.exp(-1) / 2
    assert value.item() == approx(-math.log((before + batch) / 2), rel=1e-6)
    assert losses.grad.tolist() == approx([math.exp(-1) / (before + batch), 0.0], rel=1e-6)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened():
    random = torch.Generator().manual_seed(0)
    batches = [torch.rand(4, generator=random) for _ in range(6)]
    whole = RunningTiltedLoss(3.0)
    expected = [whole(batch).item() for batch in batches]
    first = RunningTiltedLoss(3.0)
    found = [first(batch).item() for batch in batches[:3]]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again = RunningTiltedLoss(3.0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for other in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert found + [other(batch).item() for batch in batches[3:]] == expected


def test_the_estimate_is_part_of_the_model_and_keeps_its_digits_in_half_precision():
    model = nn.Sequential(nn.Linear(3, 1), RunningTiltedLoss(2.0))
    assert [name for name, _ in model.named_buffers()] == ["1.estimate"]
    assert model.half()[1].estimate.dtype == torch.float32
    assert model.double()[1].estimate.dtype == torch.float64
    assert model.to("meta")[1].estimate.device.type == "meta"


def test_a_tilt_that_moves_during_training():
    running, losses = RunningTiltedLoss(0.0, smoothing=0.5), torch.tensor([0.0, 1.0, 5.0])
    largest = []
    for running.tilt in (0.0, -0.5, -2.0):
        _, gradient = value_and_gradient(running, losses)
        largest.append(gradient[2].item())
    assert largest[0] == approx(1 / 3)
    assert largest[0] > largest[1] > largest[2]


@pytest.mark.parametrize(("build", "error", "text"), [
    (lambda: RiskLoss(0.2), TypeError, "RiskLoss needs a Risk, got 0.2. Write RiskLoss(fedtail.Superquantile(0.2))."),
    (lambda: RiskLoss(Valueless()), TypeError, "RiskLoss needs a risk with a value, which Valueless has not. Define value(losses, mass), or use Tilted or Superquantile."),
    (lambda: RunningTiltedLoss(math.inf), ValueError, "tilt (t) must be finite, got inf. For the largest loss of a batch write RiskLoss(fedtail.Worst())."),
    (lambda: RunningTiltedLoss(1.0, 0.0), ValueError, "smoothing (lambda) must be in (0, 1], got 0. It is the share of the newest batch in the estimate: write 0.2, or 1 to forget all batches before."),
    (lambda: RiskLoss(Mean())(torch.tensor(1.0)), ValueError, "losses must be those of single examples, (batch,), got shape (). Write reduction='none' in the loss function, and take the mean over the axes of an example."),
    (lambda: RunningTiltedLoss(1.0)(torch.zeros(2, 3)), ValueError, "losses must be those of single examples, (batch,), got shape (2, 3). Write reduction='none' in the loss function, and take the mean over the axes of an example."),
    (lambda: RiskLoss(Tilted(1.0))(torch.zeros(2), torch.zeros(2).long()), ValueError, "Tilted has no groups. RiskLoss takes the losses of single examples, and groups only for a Hierarchical risk. Leave group out, or write RiskLoss(fedtail.Hierarchical(within=fedtail.Mean(), across=fedtail.Tilted(...)))."),
    (lambda: RiskLoss(fedtail.Ascent()), TypeError, "Ascent learns the weights of clients from round to round, which a batch has not. Use fedtail.Worst(), or fedtail.Hierarchical(within=fedtail.Mean(), across=fedtail.Worst())."),
    (lambda: RiskLoss(LEVELS[0])(torch.zeros(2)), ValueError, "a Hierarchical risk of 2 levels needs the groups of the examples, integers of shape (2,), got nothing. Write criterion(losses, group=labels)."),
    (lambda: RiskLoss(LEVELS[0])(torch.zeros(2), torch.zeros(3).long()), ValueError, "a Hierarchical risk of 2 levels needs the groups of the examples, integers of shape (2,), got torch.int64 of shape (3,). Write criterion(losses, group=labels)."),
    (lambda: RiskLoss(Mean())(torch.zeros(0)), ValueError, "there are no losses: a risk needs one at least. Leave out an empty batch."),
    (lambda: RiskLoss(Mean())(torch.zeros(3).long()), TypeError, "losses must be floating-point numbers, got torch.int64. Write losses.float()."),
])
def test_errors_say_what_to_write(build, error, text):
    with pytest.raises(error) as raised:
        build()
    assert str(raised.value) == text


def test_they_say_what_they_are_in_a_printed_model():
    assert repr(RiskLoss(Mean())) == "RiskLoss(Mean())"
    assert repr(RunningTiltedLoss(2.0)) == "RunningTiltedLoss(tilt=2, smoothing=0.2)"


EXAMPLES = (torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3)


@pytest.mark.filterwarnings("ignore")      # Lightning's advice on processes and loggers
def test_a_lightning_run_goes_on_from_its_checkpoint(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network, self.criterion = nn.Linear(6, 3), RunningTiltedLoss(2.0)

        def training_step(self, batch, number):
            return self.criterion(nn.functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none"))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(epochs, start=None):
        model = Classifier()
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
                                    enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path)
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*EXAMPLES), batch_size=16)
        trainer.fit(model, batches, ckpt_path=start)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return model

    trained(1)
    went_on, whole = trained(2, tmp_path / "1.ckpt"), trained(2)
    assert whole.criterion.estimate.isfinite()
    for name, found in went_on.state_dict().items():
        torch.testing.assert_close(found, whole.state_dict()[name], rtol=0, atol=0)
    by_hand = Classifier()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        by_hand.training_step([part[16 * (number % 3):][:16] for part in EXAMPLES], number).backward()
        optimizer.step()
    torch.testing.assert_close(by_hand.state_dict(), dict(whole.state_dict()))


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_transformers_goes_on_from_its_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Network(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.last, self.criterion = nn.Linear(6, 3), RunningTiltedLoss(2.0)
            self.post_init()

        def forward(self, inputs, labels=None):
            return {"logits": self.last(inputs)}

    def trained(steps, start=None, accumulated=1, criterion=None):
        torch.manual_seed(0)
        model = Network(transformers.PretrainedConfig())
        criterion = criterion or model.criterion
        settings = transformers.TrainingArguments(
            str(tmp_path / str(accumulated)), max_steps=steps, save_steps=3, per_device_train_batch_size=12 // accumulated, report_to="none",
            use_cpu=True, disable_tqdm=True, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
            average_tokens_across_devices=False, gradient_accumulation_steps=accumulated)
        rows = [{"inputs": x, "labels": y} for x, y in zip(*EXAMPLES, strict=True)]

        def tilted_loss(outputs, labels, num_items_in_batch=None):
            return criterion(nn.functional.cross_entropy(outputs["logits"], labels, reduction="none"))

        trainer = transformers.Trainer(model, settings, train_dataset=rows, compute_loss_func=tilted_loss)
        trainer.loss_is_scaled_for_ga = False
        trainer.train(resume_from_checkpoint=start)
        return model

    whole = trained(6)
    assert whole.criterion.estimate.isfinite()
    went_on = trained(6, start=str(tmp_path / "1" / "checkpoint-3"))
    torch.testing.assert_close(dict(went_on.state_dict()), dict(whole.state_dict()), equal_nan=True)
    once, twice = (trained(1, accumulated=steps, criterion=RiskLoss(Mean())) for steps in (1, 2))      # two halves of one batch
    torch.testing.assert_close(once.last.weight, twice.last.weight)
