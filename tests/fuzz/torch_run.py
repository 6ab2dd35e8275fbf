"""A run of the PyTorch optimizer: the part of its machine that trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from torch import Tensor

from cafin_cupy import CafinError, NonFiniteError
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW

from .array_run import KEPT, PRECISIONS, RULES, coefficients, fitting_precision
from .arrays import DTYPES, Style, dtype_of, fingerprint, make, momenta_of, styles, value
from .calls import attempt, figures
from .checks import Rule, all_finite, check_update, what_counts
from .expected import Scalars
from .functions import SCALARS
from .torch_groups import DIVISIONS, divide, possible
from .torch_models import MODELS, build
from .torch_seen import Watched

LAYOUTS = ("contiguous", "fortran", "channels_last", "sliced", "inner", "offset", "shuffled")
ODD = ("expanded", "negative", "sparse")  # gradients that torch itself neither adds to nor clears
torch.set_num_threads(1)


class TorchRun(Watched):
    """Attributes:
    params: of each parameter group; scalars: those of each; signs: -1 of those that maximize.
    t: completed steps; steps: those of each parameter, by its id.
    skips: of each layer, how often a NaN has kept its factors as they were.
    devices: over how many the model is spread.
    """

    devices = 1

    @initialize(
        name=st.sampled_from(sorted(MODELS)),
        dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16", "bfloat16"]),
        seed=st.integers(0, 99),
        channels_last=st.booleans(),
        capturable=st.booleans(),
        averaging=st.sampled_from(sorted(RULES)),
        gamma=st.sampled_from([0.8, 0.0, 1.0]),
        TCov=st.sampled_from([1, 2, 3, 100]),
        x=SCALARS,
        others=SCALARS,
        precision=PRECISIONS,
        division=st.sampled_from(sorted(DIVISIONS)),
        maximize=st.sampled_from([False, False, True]),
    )
    def construct(
        self,
        name: str,
        dtype: str,
        seed: int,
        channels_last: bool,
        capturable: bool,
        averaging: str,
        gamma: float,
        TCov: int,
        x: Scalars,
        others: Scalars,
        precision: dict[str, Any],
        division: str,
        maximize: bool,
    ) -> None:
        self.kind = MODELS[name]
        self.model = build(name, dtype, seed, channels_last and name == "images")
        if self.framework == "lent":  # the kernels refuse other layouts
            for p in self.model.parameters():
                p.data = p.data if p.dim() == 4 else p.data.contiguous()
        self.dtype, self.TCov, self.t = dtype, TCov, 0
        self.average = Rule(coefficients(RULES[averaging], gamma))
        self.precision = fitting_precision(precision, dtype, DTYPES["torch"])
        self.steps: dict[int, int] = {}
        self.odd: set[int] = set()  # parameters with an odd gradient
        self.saved: list[Any] = []
        self.options = {"averaging": RULES[averaging], "gamma": gamma, "TCov": TCov, **torchs(self.precision)}
        self.options["capturable"] = capturable and self.devices == 1
        kind: Any = AdaFisherW if x.decoupled else AdaFisher
        own = [x, *[replace(others, decoupled=x.decoupled)] * 2]  # the last group has the optimizer's
        asked, self.params = divide(self.model, division)
        groups = [{"params": each, **kept(scalars), "maximize": False} for each, scalars in zip(asked, own[1:])]
        self.opt: Any = None
        if asked:
            self._make(kind, x, maximize, groups, possible(self.model, self.params, asked))
        if self.opt is None:
            groups, self.params = [], [list(self.model.parameters())]
            self._make(kind, x, maximize, None, True)
        rest = len(self.params) - len(groups)
        self.scalars, self.signs = [*own[1:][: len(groups)], *[x] * rest], [1] * len(groups) + [1 - 2 * maximize] * rest
        self.find_layers()
        self.skips = [0] * len(self.layers)
        for p in self.every:
            figures.seen(p.shape)

    def _make(self, kind: Any, x: Scalars, maximize: bool, groups: Any, valid: bool) -> None:
        options = {**kept(x), **self.options, "maximize": maximize, "param_groups": groups}
        outcome = attempt(
            "torch AdaFisher()",
            lambda: kind(self.model, **options),
            valid=valid,
            inputs=[[*self.model.parameters()], options],
        )
        self.opt = outcome.result if outcome.done else None

    # What must be known of the optimizer

    @property
    def samples(self) -> bool:
        return self.t % self.TCov == 0

    @property
    def every(self) -> list[Any]:
        return [p for group in self.params for p in group]

    def but_gradients(self) -> list[Any]:
        opt = self.opt
        states = [as_told(opt.state.get(p)) for p in self.every]
        scalars = [[group[name] for name in (*KEPT, "maximize")] for group in opt.param_groups]
        options = [opt.steps, opt.TCov, opt.error_if_nonfinite]
        left = [name for name in vars(opt) if not name.startswith("_")]  # a scaler may leave something there
        return [self.every, states, opt.factors(), opt.skipped_refreshes(), scalars, options, left]

    def everything(self) -> list[Any]:
        hooks = [len(m._forward_hooks) for m in self.model.modules()]
        return [*self.but_gradients(), [p.grad for p in self.every], hooks]

    def of_layers(self, named: dict[str, Any]) -> list[Any]:
        """What the optimizer tells of modules, for each layer."""
        first = {k: name for name, k in reversed(self.names.items())}
        return [named[first[k]] for k in range(len(self.layers))]

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "opt"):
            return
        opt = self.opt
        assert (opt.steps, opt.TCov, opt.samples) == (self.t, self.TCov, self.samples)
        assert [list(map(id, group["params"])) for group in opt.param_groups] == [
            list(map(id, group)) for group in self.params
        ]
        trained = [p for p in self.every if p.requires_grad or id(p) in self.steps] or self.every
        kernels = self.framework == "lent" and all(p.dtype is not torch.float64 for p in trained)
        assert opt.backend == ("cuda" if kernels else "reference")
        assert self.of_layers(opt.skipped_refreshes()) == self.skips
        lengths = {name: (len(H), len(S)) for name, (H, S) in opt.factors().items()}
        layers = {name: self.layers[k][0] for name, k in self.names.items()}
        assert lengths == {name: (layer.length, layer.rows) for name, layer in layers.items()}
        for p in self.every:
            assert int(opt.state[p]["step"] if p in opt.state else 0) == self.steps.get(id(p), 0)

    # Forward and backward

    def loss(self, batch: int, style: Style, train: bool = True, trained_input: bool = False) -> Tensor:
        """A loss whose gradient differs from entry to entry; it has one even where nothing trains."""
        self.model.train(train)
        x = make("torch", (max(batch, self.kind.least), *self.kind.sample), style.of(0, self.dtype)).array
        if self.kind.words:
            x = x.float().abs().long() % self.kind.words
        else:
            x.requires_grad_(trained_input)
        with self._products():
            out = self.model(x).float()
        weights = torch.arange(out.numel()).reshape(out.shape).sin() / max(1, out.numel())
        return (out * weights).sum() + torch.zeros((), requires_grad=True)

    @rule(
        batch=st.sampled_from([3, 1, 2, 0, 7]),
        train=st.sampled_from([True, True, True, False]),
        style=styles(LAYOUTS),
        again=st.booleans(),
        trained_input=st.booleans(),
        autocast=st.sampled_from([False, False, True]),
        grad=st.sampled_from([True, True, True, False]),
    )
    def backward(
        self, batch: int, train: bool, style: Style, again: bool, trained_input: bool, autocast: bool, grad: bool
    ) -> None:
        def call() -> None:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = self.loss(batch, style, train, trained_input)
            if grad:
                loss.backward(retain_graph=again)
                if again:
                    loss.backward()

        for p in self.every:
            p.grad = None if id(p) in self.odd else p.grad
        self.odd.clear()
        attempt("torch backward()", call, valid=True, inputs=self.but_gradients)

    @rule(
        place=st.integers(0, 20),
        layout=st.sampled_from((*LAYOUTS, *ODD, "none")),
        style=styles(("contiguous",), finite=False),
    )
    def set_gradient(self, place: int, layout: str, style: Style) -> None:
        """A gradient that the script has made."""
        p = self.every[place % len(self.every)]
        if not p.requires_grad:
            return
        kind = Style(layout, style.values, dtype_of(p), style.seed)
        g = make("torch", tuple(p.shape), kind).array
        made = {"none": lambda: None, "negative": lambda: torch._neg_view(g), "sparse": g.to_sparse}
        p.grad = made.get(layout, lambda: g)() if g.dim() else g
        (self.odd.add if layout in ODD else self.odd.discard)(id(p))

    @rule(to_none=st.booleans(), of_model=st.booleans())
    def zero_grad(self, to_none: bool, of_model: bool) -> None:
        owner = self.model if of_model else self.opt
        if not self.odd:
            attempt("torch zero_grad()", lambda: owner.zero_grad(to_none), valid=True, inputs=self.but_gradients)
        else:
            owner.zero_grad()
            self.odd.clear()
        if not of_model:
            self.forget()

    # Step

    @rule(closure=st.booleans(), batch=st.integers(1, 3), style=styles(LAYOUTS))
    def step(self, closure: bool, batch: int, style: Style) -> None:
        def again() -> Tensor:
            self.opt.zero_grad()
            self.forget()
            loss = self.loss(batch, style)
            loss.backward()
            return loss

        if closure:
            again()  # for the same gradients, which are all that will count
            self.odd.clear()
        self._step("torch step()", lambda: self.opt.step(again if closure else None), closure=closure)

    @rule(
        batch=st.integers(1, 3),
        style=styles(LAYOUTS),
        power=st.sampled_from([0, 10, 16, -3]),
        unscale=st.booleans(),
        known=st.booleans(),
        poison=st.sampled_from([False, False, True]),
    )
    def scaled_step(self, batch: int, style: Style, power: int, unscale: bool, known: bool, poison: bool) -> None:
        """An iteration under a GradScaler."""
        opt, scale = self.opt, 2.0**power
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        opt.grad_scaler = scaler if known else None
        opt.zero_grad()
        self.odd.clear()
        self.forget()
        scaler.scale(self.loss(batch, style)).backward()
        grads = [p.grad for p in self.every if p.grad is not None and p.grad.numel()]
        if not grads:
            return
        if poison:
            grads[0][(0,) * grads[0].dim()] = float("inf")
        skipped = not all(bool(g.isfinite().all()) for g in grads)  # those of a model that has diverged, too
        if unscale:
            scaler.unscale_(opt)
        name, call = "torch step() by a scaler", lambda: scaler.step(opt)
        if skipped:
            attempt(name, call, valid=True, inputs=self.but_gradients)  # torch multiplies those by 1, NaN by NaN
            self.forget()
        else:
            valid = known or not unscale or not self.samples or not any(self.pending)
            self._step(name, call, 1.0 if unscale else scale, scale, valid)
        opt.grad_scaler = None

    def _step(
        self,
        name: str,
        call: Any,
        scale: float = 1.0,
        loss_scale: float = 1.0,
        valid: bool | None = True,
        closure: bool = False,
    ) -> None:
        """A step, the gradients of which are multiplied by `scale`, and the output gradients by `loss_scale`."""
        opt, every = self.opt, self.every
        valid = valid and all(p.grad is None or p.grad.layout is torch.strided for p in every)
        fresh = [p not in opt.state for p in every]
        momenta = [value(torch.zeros(p.shape) if n else opt.state[p]["exp_avg"]) for p, n in zip(every, fresh)]
        params = [what_counts(p, None if n else opt.state[p].get("master")) for p, n in zip(every, fresh)]
        still = [p for p in every if p.grad is None]
        factors, traces = (
            [tuple(map(value, pair)) for pair in self.of_layers(self.opt.factors())],
            fingerprint(self.of_layers(self.opt.factors())),
        )
        state, grads = self.but_gradients if closure else self.everything, [] if closure else [p.grad for p in every]

        def read() -> Any:
            # A momentum may follow its parameter in memory, and a master start from it.
            return [grads, still, [held_by(self._state(p)) for p in still]]

        finite: bool | None = True
        if valid and opt.error_if_nonfinite:
            finite = None if closure else self._finite(loss_scale)  # a closure makes other gradients
        kind = CafinError if finite else NonFiniteError
        if not attempt(name, call, valid=valid and finite, inputs=read, state=state, kind=kind).done:
            return
        if self.samples:
            skips = self.of_layers(opt.skipped_refreshes())
            for k, ((layer, weight, _), old, new) in enumerate(
                zip(self.layers, factors, self.of_layers(self.opt.factors()))
            ):
                kept = self.average.check_factors(f"layer {k}", layer, weight, self.pending[k], loss_scale, old, new)
                self.skips[k] = skips[k] if kept is None else self.skips[k] + kept
            self.forget()
        else:
            assert fingerprint(self.of_layers(self.opt.factors())) == traces, (
                "factors have changed on an unsampled step"
            )
        self.t += 1
        of_groups = [pair for group, *pair in zip(self.params, self.scalars, self.signs) for _ in group]
        usual = self.precision["momentum_dtype"] or momenta_of(self.dtype)[0]
        for k, (p, (x, sign)) in enumerate(zip(every, of_groups)):
            if p.grad is not None:
                self.steps[id(p)] = self.steps.get(id(p), 0) + 1
                was = params[k], value(p.grad), momenta[k]
                assert not fresh[k] or dtype_of(opt.state[p]["exp_avg"]) == usual
                self._check_parameter(str(k), p, was, x, sign * scale)

    def _state(self, p: Any) -> Any:
        state = self.opt.state.get(p)
        whole = state and self.precision.get("master_weights") and p.element_size() == 2
        return {"master": p.detach().float(), **state} if whole else state

    def _finite(self, loss_scale: float) -> bool | None:
        """Whether all that the coming step will use is."""
        pairs = zip(self.layers, self.pending) if self.samples else ()
        moments = [self.average.finite(layer, calls, loss_scale) for (layer, _, _), calls in pairs]
        return all_finite([p.grad for p in self.every], moments)

    def _check_parameter(self, name: str, p: Any, was: Any, x: Scalars, scale: float) -> None:
        pair = None
        for k, (layer, weight, bias) in enumerate(self.layers):
            if pair is None and (p is weight or p is bias):
                pair = self.average.pair(
                    layer, "weight" if p is weight else "bias", weight, self.of_layers(self.opt.factors())[k]
                )
        state = self.opt.state[p]
        assert ("master" in state) == ("master" in self._state(p))
        check_update(name, p, state["exp_avg"], was, pair, x, self.steps[id(p)], scale, state.get("master"))


def kept(x: Scalars) -> dict[str, Any]:
    return {name: getattr(x, name) for name in KEPT}


def torchs(precision: dict[str, Any]) -> dict[str, Any]:
    """The same options with a dtype of PyTorch."""
    name = precision["momentum_dtype"]
    return {**precision, "momentum_dtype": name and getattr(torch, name)}


def as_told(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """A parameter's state, whatever holds its number of steps: under a scaler that lies on the device. A first step
    that the scaler prevents there leaves a momentum of zeros behind, as good as none."""
    if state is None:
        return None
    told = {key: int(item) if key == "step" else item for key, item in state.items()}
    on_device = isinstance(state.get("step"), Tensor)
    return None if on_device and not told["step"] and not bool(told["exp_avg"].any()) else told


def held_by(x: Any) -> Any:
    """What a state holds, whatever the objects are: for a comparison."""
    if isinstance(x, Tensor) and x.dim():
        return tuple(x.shape), dtype_of(x), value(x).tobytes()
    if isinstance(x, dict):
        return {key: held_by(item) for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return [held_by(item) for item in x]
    return repr(float(x)) if hasattr(x, "__float__") else x
