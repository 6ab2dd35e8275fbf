"""The PyTorch optimizer on tensors of odd forms: updated as if they were contiguous and alone, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_helpers import (  # noqa: E402
    TOLERANCE,
    assert_moments,
    assert_same,
    everything,
    images,
    mlp,
    near,
    net,
    record,
    refused,
    rows,
    run,
    torch_device,  # noqa: F401
    weighted,
)

from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:.*no factors"), pytest.mark.filterwarnings("ignore:.*were not seen")]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loose(*tensors: Tensor, **options: Any) -> tuple[AdaFisher, list[nn.Parameter]]:
    """An optimizer of parameters that no layer owns."""
    model = nn.ParameterList(nn.Parameter(t) for t in tensors)
    return AdaFisher(model, lr=0.1, **options), list(model)


def step(optimizer: AdaFisher, seed: int) -> None:
    """One step with gradients drawn by `seed`, contiguous ones."""
    for k, p in enumerate(optimizer.model.parameters()):
        p.grad = randn(1000 * seed + k, *p.shape).to(p)
    optimizer.step()


# Forms of parameters


def at_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(x.shape)


def inner(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], -1)[..., 0]


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the kernels take it
    "at an odd address": (at_odd_address, True),
    "channels_last": (lambda x: x.to(memory_format=torch.channels_last), True),
    "every other entry": (inner, False),
    "axes reversed": (lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_parameters(name: str, device: str) -> None:
    form, taken = FORMS[name]
    optimizers = []
    for make in (form, lambda x: x):
        layer = nn.Conv2d(3, 4, 2).to(device)
        layer.weight = nn.Parameter(make(randn(1, 4, 3, 2, 2).to(device)))
        layer.bias = nn.Parameter(torch.zeros(4, device=device))
        optimizers.append(AdaFisher(layer, TCov=100, weight_decay=0.1))
    odd, plain = optimizers
    if device == "cuda" and not taken:
        odd.model.weight.grad = torch.ones_like(odd.model.weight)
        with refused(odd, "step: `weight` must be contiguous or channels_last", "pass .contiguous()"):
            odd.step()
        return
    for seed in range(3):
        step(odd, seed)
        step(plain, seed)
    assert_same(odd, plain)


def test_scalars_and_empty_parameters(device: str) -> None:
    """Also where nothing else is there to train."""
    optimizer, (scalar, empty, vector) = loose(*(torch.ones(s, device=device) for s in ((), (0, 3), (4,))))
    for _ in range(2):
        for p in optimizer.model:
            p.grad = torch.ones_like(p)
        optimizer.step()
    want = 1 - 0.1 - 0.1 * (0.19 / 0.19)  # two steps with F = 1 and a constant gradient
    near(scalar, torch.tensor(want))
    near(vector, torch.full((4,), want))
    assert empty.shape == (0, 3) and [optimizer.state[p]["step"] for p in optimizer.model] == [2, 2, 2]
    only, (p,) = loose(torch.ones(0, device=device))
    p.grad = torch.ones_like(p)
    only.step()
    assert only.steps == only.state[p]["step"] == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("averaging", ["parity", "paper"])
@pytest.mark.parametrize(("sizes", "batch"), [((5, 0, 3), 4), ((5, 4, 3), 0)], ids=["no unit", "no row"])
def test_layers_that_see_nothing(sizes: tuple[int, ...], batch: int, averaging: str, device: str) -> None:
    """Their factors stay as they are, and training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])).to(device)
    optimizer = AdaFisher(model, TCov=1, averaging=averaging)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(batch, 5, device=device)).sum().backward()
        optimizer.step()
    assert all(bool((f == 1).all()) for pair in optimizer.factors().values() for f in pair)
    assert optimizer.steps == 2 and all(bool(p.isfinite().all()) for p in model.parameters())


def test_ten_thousand_parameters(device: str) -> None:
    """Slices of one buffer. Half of them get their first gradient on the second step: as two large parameters."""
    flat, grad = (randn(k, 30_000).to(device) for k in range(2))
    early, late = (loose(flat.clone(), weight_decay=0.1) for _ in range(2))
    many, parts = loose(*flat.chunk(10_000), weight_decay=0.1)
    for count in range(2):
        for k, (part, piece) in enumerate(zip(parts, grad.chunk(10_000))):
            part.grad = piece.clone() if count == 1 or k % 2 else None
        many.step()
        assert len(many.state) == (10_000 if count else 5_000)
        for optimizer, (p,) in (early, late)[: 1 + count]:
            p.grad = grad.clone()
            optimizer.step()
    odd = torch.arange(30_000, device=device) // 3 % 2 == 1
    # To a few roundings: CPUs add in vectors.
    near(flat, torch.where(odd, early[1][0].detach(), late[1][0].detach()), tolerance=1e-6)


def test_subclasses_of_parameters_and_tensors(device: str) -> None:
    class Mine(nn.Parameter):
        pass

    class Tagged(Tensor):
        pass

    optimizers = []
    for kind in (Mine, lambda x: nn.Parameter(x.as_subclass(Tagged)), nn.Parameter):
        model = mlp(device)
        model[0].weight = kind(model[0].weight.detach())
        optimizers.append(run(AdaFisher(model, TCov=2), rows(device, 3)))
    for optimizer in optimizers[:2]:
        assert_same(optimizer, optimizers[2])


# Gradients that share memory with what the step writes


class HalfSquare(torch.autograd.Function):
    """Half the sum of squares, whose gradient is the parameter itself: in its own memory."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return 0.5 * w.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].detach()


Share = Callable[[AdaFisher, Sequence[Any]], Sequence[Tensor]]
SHARES: dict[str, Share] = {  # of two parameters of ten elements, the gradients
    "its parameter": lambda o, p: [p[0].detach(), p[1].detach()],
    "its momentum": lambda o, p: [o.state[p[0]]["exp_avg"], o.state[p[1]]["exp_avg"]],
    "the other's parameter": lambda o, p: [p[1].detach(), p[0].detach()],
    "the other's momentum": lambda o, p: [o.state[p[1]]["exp_avg"], o.state[p[0]]["exp_avg"]],
    "parts of both parameters": lambda o, p: [o.model.memory[5:15], o.model.memory[3:13]],
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", SHARES)
def test_gradients_that_share_memory_count_as_they_were(name: str, weight_decay: float, device: str) -> None:
    optimizers = []
    for copies in (False, True):
        memory = randn(0, 20).to(device)
        optimizer, params = loose(memory[:10], memory[10:], weight_decay=weight_decay)
        optimizer.model.memory = memory
        step(optimizer, 1)
        optimizer.add_param_group({"params": []})  # the kernels look at gradients closely where something is new
        for _ in range(2):
            for p, g in zip(params, SHARES[name](optimizer, params)):
                p.grad = g.clone() if copies else g
            optimizer.step()
        optimizers.append(optimizer)
    assert_same(*optimizers)


def test_a_function_that_returns_its_parameter_as_gradient(device: str) -> None:
    ours, (p,) = loose(randn(0, 50).to(device))
    plain, (q,) = loose(randn(0, 50).to(device))
    for _ in range(3):
        ours.zero_grad()
        HalfSquare.apply(p).backward()
        assert p.grad.data_ptr() == p.data_ptr()
        q.grad = q.detach().clone()
        ours.step()
        plain.step()
    assert_same(ours, plain)


class LeavesOut(torch.autograd.Function):
    """Passes both on, and says that the loss does not depend on the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0], None


def test_a_layer_whose_output_gradient_is_none_is_not_seen(device: str) -> None:
    """As behind DistributedDataParallel, where a loss leaves an output out."""
    torch.manual_seed(0)
    used, left_out = torch.nn.Linear(5, 3).to(device), torch.nn.Linear(5, 3).to(device)
    optimizer = AdaFisher(torch.nn.ModuleList([used, left_out]), TCov=1)
    x = torch.randn(4, 5, device=device)
    first, second = LeavesOut.apply(used(x), left_out(x))
    (first.square().mean() + second.square().mean()).backward()
    optimizer.step()
    (H, S), (unseen_H, unseen_S) = optimizer.factors().values()
    assert (H < 1).all() and (S < 1).all() and (unseen_H == 1).all() and (unseen_S == 1).all()


def test_momenta_that_share_memory_are_refused(device: str) -> None:
    optimizer, (p, q) = loose(torch.ones(4, device=device), torch.ones(4, device=device))
    step(optimizer, 1)
    optimizer.state[q]["exp_avg"] = optimizer.state[p]["exp_avg"]
    with refused(optimizer, "step: `momentum of 1` must not share memory with `momentum of 0`"):
        optimizer.step()
    optimizer.state[q]["exp_avg"] = p.detach()
    with refused(optimizer, "must not share memory with", "momentum of 1"):
        optimizer.step()


# Changes between steps


def to_flat_buffer(optimizer: AdaFisher) -> None:
    """As some libraries keep all parameters in one tensor."""
    params = list(optimizer.model.parameters())
    flat = torch.cat([params[0].detach().new_zeros(1), *(p.detach().flatten() for p in params)])[1:]
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.data = piece.view(p.shape)


def each_momentum(change: Callable[[dict[str, Any]], None]) -> Callable[[AdaFisher], None]:
    return lambda optimizer: [change(state) for state in optimizer.state.values()] and None


def each_parameter(change: Callable[[Any], None]) -> Callable[[AdaFisher], None]:
    return lambda optimizer: [change(p) for p in optimizer.model.parameters()] and None


CHANGES: dict[str, Callable[[AdaFisher], Any]] = {
    "channels_last": lambda o: o.model.to(memory_format=torch.channels_last),
    "double and back": lambda o: o.model.double().float(),
    "shared between processes": lambda o: o.model.share_memory(),
    "other memory": each_parameter(lambda p: setattr(p, "data", p.data.clone())),
    "one buffer": to_flat_buffer,
    "other momenta": each_momentum(lambda state: state.update(exp_avg=state["exp_avg"].clone())),
    "momenta in other memory": each_momentum(lambda state: setattr(state["exp_avg"], "data", state["exp_avg"].clone())),
    "expanded momenta": each_momentum(lambda state: state.update(exp_avg=inner(state["exp_avg"]))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps(name: str, device: str) -> None:
    """Parameters and momenta move or change their strides; the numbers are those of a run without it."""
    changed, plain = (AdaFisher(net(device), TCov=3, weight_decay=0.1) for _ in range(2))
    for optimizer in (changed, plain):
        for seed in range(5):
            for p in optimizer.model.parameters():
                p.grad = None
            if seed == 2 and optimizer is changed:
                CHANGES[name](optimizer)
            step(optimizer, seed)
    assert_same(changed, plain)


def test_a_momentum_that_moves_is_noticed(device: str) -> None:
    """Scripts that lend a GPU's memory to others send each momentum to the CPU and back by `exp_avg.data = ...`."""
    optimizer, (p, _) = loose(torch.ones(4, device=device), torch.ones(4, device=device))
    step(optimizer, 1)
    assert optimizer._plan is not None and optimizer._plan.valid(optimizer)
    average = optimizer.state[p]["exp_avg"]
    average.data = average.data.clone()
    assert not optimizer._plan.valid(optimizer)


def test_a_model_that_turns_to_half_precision_on_the_cpu() -> None:
    """It goes on in float16, its momentum in float32."""
    half, full = (AdaFisher(mlp("cpu"), lr=1e-5, TCov=100) for _ in range(2))
    for optimizer in (half, full):
        step(optimizer, 0)
    half.model.half()
    for optimizer in (half, full):
        step(optimizer, 1)
    for p, q in zip(half.model.parameters(), full.model.parameters()):
        assert p.dtype == torch.float16 and half.state[p]["exp_avg"].dtype == torch.float32
        near(p, q, tolerance=2e-3)  # float16 has eleven bits


# Inputs and output gradients of layers

INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.mT.contiguous().mT,
    "at an odd address": at_odd_address,
    "every other entry": inner,
    "negative bit": lambda x: torch._neg_view(-x),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
}


@pytest.mark.parametrize("name", INPUTS)
def test_forms_of_inputs_and_output_gradients(name: str, device: str) -> None:
    """The moments of the numbers that the layers see, whatever lies in their memory."""
    for model, x in ((nn.Linear(5, 3), randn(0, 6, 5)), (nn.Conv2d(3, 4, 2), randn(1, 2, 3, 6, 5))):
        seen = record(model.to(device))
        optimizer = AdaFisher(model, TCov=1, averaging=RAW)
        out = model(INPUTS[name](x.to(device)))
        grad = torch.autograd.grad(weighted(out), out, retain_graph=True)[0]
        out.backward(INPUTS[name](grad))
        optimizer.step()
        assert_moments(optimizer, seen)


NO_ROWS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(5).to_sparse(),
    "sparse rows": lambda: torch.eye(5).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(2, 5)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(2, 5)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state)")
@pytest.mark.parametrize("name", NO_ROWS)
def test_sparse_and_nested_inputs_leave_their_layer_without_factors(name: str) -> None:
    """It trains, and one warning says why its factors stay."""
    model = nn.Linear(5, 3)
    optimizer = AdaFisher(model, TCov=1)
    before = everything(optimizer)
    with pytest.warns(UserWarning, match="met a sparse or nested input") as caught:
        for _ in range(2):
            optimizer.zero_grad()
            out = model(NO_ROWS[name]())
            out = out.to_padded_tensor(0.0) if out.is_nested else out
            out.square().sum().backward()
            optimizer.step()
    assert len([w for w in caught if "met a sparse" in str(w.message)]) == 1
    after = everything(optimizer)
    assert not torch.equal(after["weight"], before["weight"])
    assert torch.equal(after["H of "], before["H of "])


def test_images_in_channels_last_throughout(device: str) -> None:
    """Model and data: to the rounding of sums in another order."""
    last, plain = (AdaFisher(net(device), TCov=2) for _ in range(2))
    last.model.to(memory_format=torch.channels_last)
    batches = images(device, 3, 3, 3)
    run(last, [x.to(memory_format=torch.channels_last) for x in batches])
    assert_same(last, run(plain, batches), TOLERANCE)
