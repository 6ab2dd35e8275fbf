"""nn.MultiheadAttention: the factors of its matrices, and that its forward stays what it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import RAW  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_helpers import TOLERANCE, assert_same, everything, near, torch_device, weighted  # noqa: E402, F401

from cafin_cupy.adapters import torch_attention, torch_compiled  # noqa: E402
from cafin_cupy.adapters.torch import AdaFisher  # noqa: E402

WIDTH, HEADS = 8, 2
# Whatever memory a compiler takes or gives back, "aot_eager" does so.
BACKENDS = [pytest.param("eager", marks=pytest.mark.host), "aot_eager"]
follows = pytest.mark.skipif(not torch_compiled.FOLLOWS, reason="this PyTorch breaks the graph at a hook on a tensor")
Call = tuple[Tensor, Tensor, Tensor, Tensor]  # query, key, value and output gradient, (L, B, E), in float64


def watched(module: nn.MultiheadAttention) -> list[Call]:
    """From now on the calls of an attention."""
    calls: list[Call] = []

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        given = [x.detach().clone() for x in args]

        def known(s: Tensor) -> None:
            each = [x.detach().cpu().double() for x in (*given, s)]
            each = [x if x.dim() == 3 else x.unsqueeze(1) for x in each]
            calls.append(tuple(x.transpose(0, 1) if module.batch_first and s.dim() == 3 else x for x in each))

        if output[0].requires_grad:
            output[0].register_hook(known)

    module.register_forward_hook(hook)
    return calls


def replayed(module: nn.MultiheadAttention, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """(input, output gradient) of each projection, by the textbook's formula in float64."""
    weights = {name: p.detach().cpu().double() for name, p in module.named_parameters()}
    if module.in_proj_weight is not None:
        parts = weights["in_proj_weight"].chunk(3)
    else:
        parts = [weights[f"{name}_proj_weight"] for name in "qkv"]
    biases = weights["in_proj_bias"].chunk(3) if "in_proj_bias" in weights else [torch.zeros(WIDTH).double()] * 3
    *inputs, s = call
    made = [(x @ w.T + b).requires_grad_() for x, w, b in zip(inputs, parts, biases)]
    q, k, v = made
    if module.bias_k is not None:
        k, v = (torch.cat([x, weights[f"bias_{n}"].expand(1, *x.shape[1:])]) for n, x in (("k", k), ("v", v)))
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (k, v))
    q, k, v = (x.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # (B, heads, length, E / heads)
    mixed = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1) @ v
    mixed = mixed.permute(2, 0, 1, 3).flatten(2).requires_grad_()
    out = mixed @ weights["out_proj.weight"].T + weights.get("out_proj.bias", 0.0)
    gradients = torch.autograd.grad(out, made, s)
    return {**dict(zip("qkv", zip(inputs, gradients))), "out": (mixed.detach(), s)}


def means(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """mean h², mean s² over the rows of all calls."""
    return tuple(torch.cat([p[k].flatten(0, 1) for p in pairs]).square().mean(0) for k in (0, 1))  # type: ignore[return-value]


def assert_attention(optimizer: AdaFisher, name: str, module: nn.MultiheadAttention, calls: list[Call]) -> None:
    """For calls of one length each of query and key."""
    factors = optimizer.factors()
    seen = [replayed(module, call) for call in calls]
    parts = {each: means([call[each] for call in seen]) for each in seen[0]}
    one = torch.ones(1, dtype=torch.float64)
    has_bias = module.in_proj_bias is not None
    wanted = {"out_proj": (torch.cat([parts["out"][0], one]) if has_bias else parts["out"][0], parts["out"][1])}
    if module.in_proj_weight is not None:
        H = sum(parts[each][0] for each in "qkv") / 3
        wanted["in_proj"] = (torch.cat([H, one]) if has_bias else H), torch.cat([parts[each][1] for each in "qkv"])
    else:
        wanted |= {f"{each}_proj": parts[each] for each in "qkv"}
    assert {each.removeprefix(name) for each in factors if each.startswith(name)} >= set(wanted)
    for matrix, pair in wanted.items():
        for got, true, letter in zip(factors[name + matrix], pair, "HS"):
            near(got, true, f"{letter} of {matrix}", 2e-5)  # the softmax adds to the roundings of other layers


def inputs(device: str, kind: str, batch_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(7)
    q, k, v = (torch.randn(length, 3, WIDTH, device=device) for length in (5, 7, 7))
    q, k, v = {"self": (q, q, q), "shared": (q, k, k), "apart": (q, k, v), "keys": (q, q, k[:5])}[kind]
    if batch_first:
        known = {id(x): x.transpose(0, 1).contiguous() for x in (q, k, v)}
        q, k, v = (known[id(x)] for x in (q, k, v))
    return q, k, v


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "bias of keys": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
}


@pytest.mark.filterwarnings("ignore:.*no factors .* for bias_k, bias_v")
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "shared", "apart", "keys"])
@pytest.mark.parametrize("options", OPTIONS)
def test_raw_moments(options: str, kind: str, need_weights: bool, device: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, **OPTIONS[options]).to(device)
    with torch.no_grad():
        for p in module.parameters():  # biases start at 0
            p.add_(0.1 * torch.randn_like(p))
    calls = watched(module)
    optimizer = AdaFisher(module, TCov=1, averaging=RAW)
    given = inputs(device, kind, module.batch_first)
    for _ in range(2):  # steps
        optimizer.zero_grad()
        weighted(module(*given, need_weights=need_weights)[0]).backward()
        before = copy.deepcopy(module)
        optimizer.step()
        assert_attention(optimizer, "", before, calls)
        calls.clear()
    assert set(optimizer.factors()) == {"in_proj", "out_proj"}


def test_one_sample(device: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    calls, optimizer = watched(module), AdaFisher(module, TCov=1, averaging=RAW)
    x = torch.randn(5, WIDTH, device=device)
    weighted(module(x, x, x)[0]).backward()
    before = copy.deepcopy(module)
    optimizer.step()
    assert_attention(optimizer, "", before, calls)


def test_widths_that_differ(device: str) -> None:
    """Then each matrix is a layer, and their common bias none's."""
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=5).to(device)
    calls = watched(module)
    with pytest.warns(UserWarning, match="no factors .F = 1. for in_proj_bias$"):
        optimizer = AdaFisher(module, TCov=1, averaging=RAW)
    q, k, v = (torch.randn(length, 3, n, device=device) for length, n in ((5, WIDTH), (7, 6), (7, 5)))
    weighted(module(q, k, v)[0]).backward()
    before = copy.deepcopy(module)
    optimizer.step()
    assert_attention(optimizer, "", before, calls)


@pytest.mark.parametrize("batch_first", [False, True])
def test_layers_of_a_transformer(batch_first: bool, device: str, recwarn: pytest.WarningsRecorder) -> None:
    """All their parameters have factors, and attention over another sequence is seen as well."""
    torch.manual_seed(1)
    options = {"dropout": 0.0, "batch_first": batch_first}
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **options)
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, **options)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder}).to(device)
    calls = {name: watched(m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    x, _, y = inputs(device, "apart", batch_first)
    weighted(decoder(x, encoder(y))).backward()
    before, old = copy.deepcopy(model), everything(optimizer)
    optimizer.step()
    assert not recwarn.list
    assert set(calls) == {"encoder.self_attn", "decoder.self_attn", "decoder.multihead_attn"}
    for name, seen in calls.items():
        assert len(seen) == 1
        assert_attention(optimizer, f"{name}.", before.get_submodule(name), seen)
    assert not any(torch.equal(S, torch.ones_like(S)) for _, S in optimizer.factors().values())
    assert not [name for name, p in model.named_parameters() if torch.equal(p, old[name])]


@pytest.mark.parametrize("kind", ["self", "shared", "apart"])
def test_micro_batches_equal_the_full_batch(kind: str, device: str) -> None:
    moments = []
    for micro in (1, 3):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
        optimizer = AdaFisher(module, TCov=1, averaging=RAW)
        given = inputs(device, kind)
        scales = torch.arange(5 * 3 * WIDTH, device=device).reshape(5, 3, WIDTH).sin().chunk(micro, 1)
        parts = list(zip(*({id(x): x.chunk(micro, 1) for x in given}[id(x)] for x in given)))
        for part, scale in zip(parts, scales):
            (module(*part)[0] * scale).sum().backward()
        optimizer.step()
        moments.append(optimizer.factors())
    for name, pair in moments[0].items():
        for one, other in zip(pair, moments[1][name]):
            near(one, other, name)


@pytest.mark.parametrize("kind", ["self", "shared", "apart"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_forward_stays_what_it_was(kind: str, need_weights: bool, device: str) -> None:
    """Bit for bit, dropout and gradients included."""
    results = []
    for every in (1, 2):  # the second step is sampled, or not
        torch.manual_seed(0)
        module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.4).to(device)
        optimizer = AdaFisher(module, TCov=every, Lambda=1e6)  # nothing moves
        given = inputs(device, kind)
        for _ in range(2):
            optimizer.zero_grad()
            torch.manual_seed(3)
            out, weights = module(*given, need_weights=need_weights)
            out.square().sum().backward()
            gradients = [p.grad for p in module.parameters()]
            optimizer.step()
        results.append([out, *([weights] if need_weights else []), *gradients])
    for a, b in zip(*results):
        assert torch.equal(a, b)


class Broken(nn.MultiheadAttention):
    error: type[BaseException] = RuntimeError

    def forward(self, *args: Any, **options: Any) -> Any:
        super().forward(*args, **options)
        raise self.error("broken")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing_behind(error: type[BaseException], device: str) -> None:
    """After Ctrl-C PyTorch calls no hook; then the mode goes with the next step, and counts nothing twice."""
    torch.manual_seed(0)
    module = Broken(WIDTH, HEADS).to(device)
    module.error = error
    optimizer = AdaFisher(module, TCov=1, averaging=RAW)
    q, k, v = inputs(device, "self")
    with pytest.raises(error):
        module(q, k, v)
    if error is RuntimeError:
        assert _get_current_function_mode() is None
    optimizer.zero_grad()
    module.__class__ = nn.MultiheadAttention
    calls = watched(module)
    weighted(module(q, k, v)[0]).backward()
    before = copy.deepcopy(module)
    optimizer.step()
    assert _get_current_function_mode() is None
    assert len(calls) == 1
    assert_attention(optimizer, "", before, calls)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_counts_once(use_reentrant: bool, device: str) -> None:
    factors = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0).to(device)
        optimizer = AdaFisher(module, TCov=1, averaging=RAW)
        x = inputs(device, "self")[0].requires_grad_()
        y = checkpoint(module, x, use_reentrant=use_reentrant) if recompute else module(x)
        weighted(y).backward()
        optimizer.step()
        assert _get_current_function_mode() is None
        factors.append(optimizer.factors())
    for name, pair in factors[0].items():
        for one, other in zip(pair, factors[1][name]):
            near(one, other, name)


class Counting(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_stay_in_force(device: str) -> None:
    """`with torch.device(...)` is one."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    calls, optimizer = watched(module), AdaFisher(module, TCov=1, averaging=RAW)
    with Counting() as outer, torch.device(device):
        weighted(module(*inputs(device, "apart"))[0]).backward()
        assert outer.seen > 0
    before = copy.deepcopy(module)
    optimizer.step()
    assert_attention(optimizer, "", before, calls)


def test_what_does_not_train_does_not_count(device: str) -> None:
    """Evaluation, no gradient, frozen matrices; the fast path stays open."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(device)
    module.in_proj_weight.requires_grad_(False)
    module.in_proj_bias.requires_grad_(False)
    calls, optimizer = watched(module), AdaFisher(module, TCov=1, averaging=RAW)
    x = inputs(device, "self")[0].transpose(0, 1).contiguous()
    with torch.no_grad():
        module(x, x, x)
    module.eval()
    weighted(module(x, x, x)[0]).backward()
    optimizer.zero_grad()
    calls.clear()
    module.train()
    weighted(module(x, x, x)[0]).backward()
    before = copy.deepcopy(module)
    optimizer.step()
    wanted = means([replayed(before, call)["out"] for call in calls])
    for got, true in zip(optimizer.factors()["out_proj"], wanted):
        near(got[:WIDTH], true, tolerance=2e-5)
    assert all(torch.equal(F, torch.ones_like(F)) for F in optimizer.factors()["in_proj"])


def test_evaluation_is_as_fast_as_it_was_between_sampled_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs an encoder layer as one function where no hooks are; and either way nothing is counted."""
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True).to(device)
    optimizer = AdaFisher(module, TCov=2, lr=0.0)
    x = inputs(device, "self", batch_first=True)[0]
    fast, seen = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: seen.append(1) or fast(*args))
    found = []
    for sampled in (True, False):
        module.eval()
        with torch.no_grad():
            found.append(module(x))
        assert bool(seen) is not sampled
        assert not optimizer._factors.pending
        module.train()
        weighted(module(x)).backward()
        optimizer.step()
    near(found[0], found[1])


def test_overwritten_input(device: str) -> None:
    """Autograd keeps a contiguous copy, so a script may."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).to(device)
    calls, optimizer = watched(module), AdaFisher(module, TCov=1, averaging=RAW)
    x = inputs(device, "self")[0].transpose(0, 1).contiguous()
    loss = weighted(module(x, x, x)[0])
    x.zero_()
    loss.backward()
    before = copy.deepcopy(module)
    optimizer.step()
    assert_attention(optimizer, "", before, calls)


def test_autocast(device: str) -> None:
    """The matrices multiply in bfloat16, of 8 bits; inputs are known as they were."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    optimizer = AdaFisher(module, TCov=1, averaging=RAW)
    given = inputs(device, "shared")
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = weighted(module(*given)[0])
    loss.backward()
    optimizer.step()
    H, S = optimizer.factors()["in_proj"]
    q, k, _ = (x.double().flatten(0, 1).square().mean(0) for x in given)
    near(H[:WIDTH], (q + 2 * k) / 3)
    assert bool(torch.isfinite(S).all()) and not torch.equal(S, torch.ones_like(S))


@pytest.mark.parametrize("every", [1, 2])
def test_a_copied_model_is_no_business_of_the_optimizer(every: int, device: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    optimizer = AdaFisher(module, TCov=every)
    twin = copy.deepcopy(module)
    weighted(twin(*inputs(device, "self"))[0]).backward()
    assert _get_current_function_mode() is None
    assert not (twin._forward_pre_hooks or twin._forward_hooks or twin._forward_hooks_always_called)
    weighted(module(*inputs(device, "self"))[0]).backward()
    copied = everything(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(optimizer, {**copied, "steps": 1})


def test_hooks_go_with_the_sampled_step(device: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    optimizer = AdaFisher(module, TCov=2)
    assert len(module._forward_pre_hooks) == 1
    for sampled in (True, False, True):
        assert bool(module._forward_pre_hooks) is sampled
        weighted(module(*inputs(device, "self"))[0]).backward()
        optimizer.step()


# Compiled


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@follows
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:.*no factors .* for (bias_k, bias_v|in_proj_bias)", "error:.*were not seen")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["self", "shared", "apart", "keys"])
@pytest.mark.parametrize("options", [*OPTIONS, "widths"])
def test_compiled(options: str, kind: str, backend: str, device: str) -> None:
    """Factors are the eager module's, with one graph for sampled steps, one for the others, and no break."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(1)
        given = {"kdim": WIDTH, "vdim": WIDTH + 1} if options == "widths" else OPTIONS[options]
        module = nn.MultiheadAttention(WIDTH, HEADS, **given).to(device)
        q, k, v = inputs(device, kind, module.batch_first)
        v = torch.cat([v, v[..., :1]], -1) if options == "widths" else v
        optimizer = AdaFisher(module, TCov=2)
        call: Any = torch.compile(module, backend=backend, fullgraph=True) if compiled else module
        for _ in range(4):
            optimizer.zero_grad()
            weighted(call(q, k, v)[0]).backward()
            optimizer.step()
        runs.append(everything(optimizer))
    for name, value in runs[0].items():
        if isinstance(value, Tensor):
            near(runs[1][name], value, name, 5 * TOLERANCE)  # four steps
    assert all(not torch.equal(F, torch.ones_like(F)) for pair in optimizer.factors().values() for F in pair)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@follows
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_transformer(backend: str, device: str) -> None:
    """Layers of one class, a frozen matrix, evaluation in between, and two optimizers of one model."""
    runs: list[list[Any]] = []
    for compiled in (False, True):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
        model.layers[1].self_attn.out_proj.weight.requires_grad_(False)
        first, second = AdaFisher(model, TCov=2), AdaFisher(model, TCov=2)
        call: Any = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        for _ in range(3):
            x = inputs(device, "self", True)[0]
            first.zero_grad()
            second.zero_grad()
            weighted(call(x)).backward()
            first.step()
            second.step()
            model.eval()
            with torch.no_grad():
                call(x)
            model.train()
        runs.append([everything(first), everything(second)])
    for eager, traced in zip(*runs):
        for name, value in eager.items():
            if isinstance(value, Tensor):
                near(traced[name], value, name, 5 * TOLERANCE)
    assert not counters["graph_break"]


# What stands around it


def encoder(device: str) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True).to(device)


def test_two_optimizers_of_one_attention(device: str) -> None:
    """As of a notebook's cell that has run twice. Each sees all of it, however many forwards come before a step."""
    model, x = encoder(device), torch.randn(2, 3, WIDTH, device=device)
    first, second = (AdaFisher(model, TCov=1, averaging=RAW) for _ in range(2))
    for _ in range(3):
        model(x).square().sum().backward()
    assert _get_current_function_mode() is None
    first.step()
    second.step()
    alone = AdaFisher(other := encoder(device), TCov=1, averaging=RAW)
    for _ in range(3):
        other(x).square().sum().backward()
    alone.step()
    for each in (first, second):
        for name, pair in alone.factors().items():
            for one, another in zip(pair, each.factors()[name]):
                assert torch.equal(one, another)


def test_ctrl_c_within_a_forward_leaves_nothing_behind(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = encoder(device), torch.randn(2, 3, WIDTH, device=device)
    optimizer = AdaFisher(model, TCov=1)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), Counting() as outer:
        patch.setattr(torch_attention, "_linear", interrupted)
        torch_attention._attention.cache_clear()
        model(x)
    torch_attention._attention.cache_clear()
    assert outer.seen and _get_current_function_mode() is None and not torch_attention._current.calls
    model(x).sum().backward()
    optimizer.step()
    assert all(not torch.equal(H, torch.ones_like(H)) for H, _ in optimizer.factors().values())


def test_nothing_keeps_an_optimizer_alive(device: str) -> None:
    """Neither hooks, nor a loss that a script holds on to: the collector is not needed."""
    model, x = nn.Sequential(encoder(device), nn.Linear(WIDTH, 2)).to(device), torch.randn(2, 3, WIDTH, device=device)
    gc.collect()
    gc.disable()
    try:
        optimizer = AdaFisher(model, TCov=1)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    loss.backward()  # of nobody's concern
    model(x)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_an_empty_query_counts_for_nothing(device: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    optimizer = AdaFisher(module, TCov=1)
    key = torch.randn(3, 2, WIDTH, device=device)
    for length in (0, 3):
        module(torch.randn(length, 2, WIDTH, device=device), key, key)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.steps == (1 if length == 0 else 2)
    assert optimizer.skipped_refreshes() == {"in_proj": 0, "out_proj": 0}
    assert all(bool(H.isfinite().all()) for H, _ in optimizer.factors().values())


def test_a_shared_matrix_with_two_biases(device: str) -> None:
    model = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS) for _ in range(2)).to(device)
    model[1].in_proj_weight = model[0].in_proj_weight
    optimizer = AdaFisher(model, TCov=1, averaging=RAW)
    x = torch.randn(3, 2, WIDTH, device=device)
    for module in model:
        module(x, x, x)[0].square().sum().backward()
    optimizer.step()
    for H, _ in optimizer.factors().values():
        assert not torch.equal(H, torch.ones_like(H))


def test_an_attention_without_its_last_matrix(device: str) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    module.out_proj = None  # type: ignore[assignment]
    assert set(AdaFisher(module, TCov=1).factors()) == {"in_proj"}
