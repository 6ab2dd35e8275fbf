"""The machine of the PyTorch optimizer: what a script changes between steps, copies, checkpoints, and refusals."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from torch import Tensor, nn

from cafin_cupy.adapters.torch import AdaFisher

from .array_run import KEPT
from .arrays import Style, dtype_of, make, styles, value
from .bad import DRESS, bad_scalars
from .calls import attempt
from .expected import Scalars
from .faults import PRECISION_FAULTS
from .functions import DRESSES, SCALARS
from .states import FORMS, KINDS, MOMENTA, in_form, of_adam, spoiled, told_twice
from .torch_groups import NO_DIVISIONS
from .torch_run import TorchRun, held_by, kept

BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{
        f"{name}: {kind}": {name: wrong}
        for name in (*KEPT, "gamma", "TCov")
        for kind, wrong in bad_scalars(name).items()
    },
    "model: parameters": {"model": [nn.Parameter(torch.ones(2))]},
    "model: None": {"model": None},
    "model: a type": {"model": nn.Linear},
    "model: no parameters": {"model": nn.ReLU()},
    "model: no memory": {"model": nn.Linear(2, 2, device="meta")},
    "model: lazy": {"model": nn.LazyLinear(2)},
    "model: complex": {"model": nn.Linear(2, 2, dtype=torch.complex64)},
    "averaging: a name": {"averaging": "mean"},
    "averaging: None": {"averaging": None},
    "averaging: a list": {"averaging": ["parity"]},
    "averaging: an array": {"averaging": np.array(["parity", "paper"])},
    "backend: a name": {"backend": "gpu"},
    "backend: an array": {"backend": np.array(["cuda", "reference"])},
    "capturable: a string": {"capturable": "no"},
    "error_if_nonfinite: a string": {"error_if_nonfinite": "no"},
    "error_if_nonfinite: capturable": {"error_if_nonfinite": True, "capturable": True},
    "grad_scaler: an object": {"grad_scaler": object()},
    **PRECISION_FAULTS,
    "maximize: a string": {"maximize": "no"},
    "differentiable": {"differentiable": True},
    **{f"an argument of AdamW: {name}": {name: 0.5} for name in ("betas", "eps", "momentum", "amsgrad", "rho")},
}
NO_GROUPS: dict[str, Any] = {  # torch says what is wrong with them
    "None": lambda params: None,
    "a number": lambda params: 5,
    "empty": lambda params: {},
    "used parameters": lambda params: {"params": params[:1]},
    "no tensor": lambda params: {"params": [None]},
    "a string": lambda params: {"params": "weight"},
    "a set": lambda params: {"params": set(params)},
    "no leaf": lambda params: {"params": [nn.Parameter(torch.ones(2)) * 1]},
    "an array": lambda params: {"params": [np.ones(3)]},
    "a name of nothing": lambda params: {"params": "nothing.*"},
    "betas": lambda params: {"params": [nn.Parameter(torch.ones(2))], "betas": (0.9, 0.999)},
    "integers": lambda params: {"params": [nn.Parameter(torch.ones(2).int(), requires_grad=False)]},
}
TORCHS = (TypeError, ValueError, KeyError, AttributeError)


class TorchOptimizer(TorchRun):
    framework = "torch"

    # What changes between steps

    @rule(group=st.integers(0, 3), x=SCALARS, dress=DRESSES, maximize=st.booleans())
    def change_scalars(self, group: int, x: Scalars, dress: tuple[str, str], maximize: bool) -> None:
        number = group % len(self.params)
        self.opt.param_groups[number]["maximize"], self.signs[number] = maximize, 1 - 2 * maximize
        values = {**{name: getattr(x, name) for name in KEPT}, dress[0]: DRESS[dress[1]](getattr(x, dress[0]))}
        self.opt.param_groups[number].update(values)
        decoupled = self.scalars[number].decoupled
        self.scalars[number] = Scalars(**{name: float(v) for name, v in values.items()}, decoupled=decoupled)

    @rule(group=st.integers(0, 3), name=st.sampled_from(KEPT), which=st.integers(0, 40))
    def spoil_a_scalar(self, group: int, name: str, which: int) -> None:
        wrong = list(bad_scalars(name).values())
        chosen = self.opt.param_groups[group % len(self.params)]
        good, chosen[name] = chosen[name], wrong[which % len(wrong)]
        attempt(f"torch step() with {name}", self.opt.step, valid=False, inputs=self.everything)
        chosen[name] = good

    @rule(
        TCov=st.sampled_from([1, 2, 3, 100]), fault=st.one_of(st.none(), st.sampled_from(sorted(bad_scalars("TCov"))))
    )
    def change_TCov(self, TCov: int, fault: str | None) -> None:
        given = TCov if fault is None else bad_scalars("TCov")[fault]
        outcome = attempt(
            "torch TCov", lambda: setattr(self.opt, "TCov", given), valid=fault is None, state=self.everything
        )
        if outcome.done:
            self.TCov = TCov
            if not self.samples:
                self.forget()

    @rule(watch=st.booleans())
    def watch(self, watch: bool) -> None:
        self.opt.error_if_nonfinite = watch

    @rule(place=st.integers(0, 20), trains=st.booleans())
    def freeze(self, place: int, trains: bool) -> None:
        p = self.every[place % len(self.every)]
        if p.is_floating_point():
            p.requires_grad_(trains)

    @rule(place=st.integers(0, 20), layout=st.sampled_from(["contiguous", "fortran", "sliced"]))
    def move(self, place: int, layout: str) -> None:
        """A parameter gets other memory, as `model.to` gives it."""
        p = self.every[place % len(self.every)]
        layout = layout if self.framework == "torch" else "contiguous"
        if p.is_floating_point():
            p.data = make("torch", tuple(p.shape), Style(layout, dtype=dtype_of(p))).array.copy_(p.data)

    @rule(place=st.integers(0, 20), share=st.sampled_from([1.0, 0.5]), seed=st.integers(0, 99))
    def overwrite(self, place: int, share: float, seed: int) -> None:
        """What a script writes into a parameter, or into half of it, counts."""
        p = self.every[place % len(self.every)]
        if p.is_floating_point():
            new = make("torch", tuple(p.shape), Style(dtype=dtype_of(p), seed=seed)).array
            torch.manual_seed(seed)
            p.data[...] = torch.where(torch.rand(p.shape) <= share, new, p.data)

    @rule(seed=st.integers(0, 99))
    def start_again(self, seed: int) -> None:
        """New parameters, in place, which a model that has diverged needs."""
        for k, p in enumerate(self.every):
            if p.is_floating_point():
                p.data.copy_(make("torch", tuple(p.shape), Style(dtype=dtype_of(p), seed=seed).of(k)).array)
            self._forget_state(p)

    @rule(place=st.integers(0, 20))
    def forget_state(self, place: int) -> None:
        self._forget_state(self.every[place % len(self.every)])

    def _forget_state(self, p: Tensor) -> None:
        self.opt.state.pop(p, None)
        self.steps.pop(id(p), None)

    @rule(
        x=SCALARS,
        size=st.sampled_from([3, 0, 1]),
        fault=st.one_of(st.none(), st.sampled_from([*KEPT, *NO_GROUPS])),
        which=st.integers(0, 40),
    )
    def add_param_group(self, x: Scalars, size: int, fault: str | None, which: int) -> None:
        if len(self.params) > 2:
            return
        p = nn.Parameter(torch.ones(size, dtype=getattr(torch, self.dtype)))
        group: Any = {"params": [p], **{name: getattr(x, name) for name in KEPT}}
        if fault in KEPT:
            wrong = list(bad_scalars(fault).values())
            group[fault] = wrong[which % len(wrong)]
        elif fault is not None:
            group = NO_GROUPS[fault](self.every)
        outcome = attempt(
            "torch add_param_group()",
            lambda: self.opt.add_param_group(dict(group) if isinstance(group, dict) else group),
            valid=fault is None,
            inputs=group,
            state=self.everything,
            also=TORCHS if fault in NO_GROUPS else (),
        )
        if outcome.done:
            self._joined([p], x)

    def _joined(self, params: list[Any], x: Scalars) -> None:
        self.params.append(params)
        self.scalars.append(replace(x, decoupled=self.scalars[0].decoupled))
        self.signs.append(1 - 2 * self.opt.defaults["maximize"])

    @rule(x=SCALARS, bias=st.booleans(), by=st.sampled_from(["pattern", "names", "parameters", "pairs"]))
    def join(self, x: Scalars, bias: bool, by: str) -> None:
        """A layer joins the model and the optimizer, which is possible between steps."""
        if len(self.params) > 2:
            return
        late = self.model.late
        dtype = getattr(torch, self.dtype)
        late.append(nn.Linear(3, 1, bias=bias, dtype=dtype))
        name, named = f"late.{len(late) - 1}", list(late[-1].named_parameters())
        given: Any = {
            "pattern": f"{name}.*",
            "names": [f"{name}.{each}" for each, _ in named],
            "parameters": [p for _, p in named],
            "pairs": named,
        }[by]
        group = {"params": given, **kept(x)}
        for hook in self.hooks:
            hook.remove()
        pending, skips, factors = self.pending, self.skips, held_by(self.opt.factors())
        outcome = attempt(
            "torch add_param_group(layer)",
            lambda: self.opt.add_param_group(group),
            valid=not any(pending),
            inputs=group,
            state=self.everything,
        )
        if outcome.done:
            self._joined([p for _, p in named], x)
            self.find_layers()
            now = held_by(self.opt.factors())
            assert {key: now[key] for key in factors} == factors, "factors have changed as a layer has joined"
            self.skips = [*skips, *[0] * (len(self.layers) - len(skips))]
        else:
            del late[-1]
            self.find_layers()
        self.pending = [*pending, *[[] for _ in self.layers[len(pending) :]]]

    # Copies and checkpoints

    @rule()
    def save(self) -> None:
        state = attempt("torch state_dict()", self.opt.state_dict, valid=True, inputs=self.everything).result
        steps = [self.steps.get(id(p), 0) for p in self.every]
        own = list(self.scalars), list(self.signs), self.t
        self.saved = [*self.saved[-2:], (copy.deepcopy(state), steps, *own)]

    @precondition(lambda self: self.saved)
    @rule(
        which=st.integers(0, 2),
        kind=st.one_of(st.none(), st.sampled_from(KINDS)),
        pick=st.integers(0, 500),
        form=st.sampled_from(FORMS),
    )
    def load(self, which: int, kind: str | None, pick: int, form: str) -> None:
        saved, steps, scalars, signs, t = self.saved[which % len(self.saved)]
        fits = [len(g["params"]) for g in saved["param_groups"]] == [len(g) for g in self.params]
        given = in_form(saved, form, pick) if kind is None else spoiled(saved, kind, pick)
        if given is None:
            return
        outcome = attempt(
            f"torch load_state_dict({kind or form})",
            lambda: self.opt.load_state_dict(given),
            valid=fits and (kind is None or (None if kind == "a key is missing" and told_twice(pick) else False)),
            inputs=[saved, given],
            state=self.everything,
        )
        if not outcome.done:
            return
        self.t, self.scalars, self.signs = t, list(scalars), list(signs)
        self.skips = [0] * len(self.layers)
        self.steps = {id(p): n for p, n in zip(self.every, steps) if n}
        self.forget()
        assert held_by(self.opt.state_dict()) == held_by(saved)

    @rule(
        form=st.sampled_from(["groups", "one group", "names"]),
        fault=st.one_of(st.none(), st.sampled_from(MOMENTA)),
        pick=st.integers(0, 500),
        dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    )
    def load_momentum(self, form: str, fault: str | None, pick: int, dtype: str) -> None:
        """Of another optimizer, for some of the parameters."""
        own = {id(p): name for name, p in self.model.named_parameters()}
        foreign = any(id(p) not in own for p in self.every)
        if form != "groups" and foreign:
            return  # they have no names, and no place in the model
        groups = self.params if form == "groups" else [list(self.model.parameters())]
        given, entries = of_adam(groups, own if form == "names" else None, fault, pick, dtype)
        outcome = attempt(
            f"torch load_momentum({fault or ''})",
            lambda: self.opt.load_momentum(given),
            valid=fault is None,
            inputs=given,
            state=self.everything,
        )
        if not outcome.done:
            return
        for p, count, average in entries:
            self.steps[id(p)] = count
            got = self.opt.state[p]["exp_avg"]
            assert np.array_equal(value(got), value(average.to(got.dtype)), equal_nan=True)

    @precondition(lambda self: not any(self.pending) and not self.odd)
    @rule(other=st.sampled_from([0, 7, 2**63]), style=styles(("contiguous",)), form=st.sampled_from(FORMS))
    def resume(self, other: int, style: Style, form: str) -> None:
        """The next step of an optimizer that has had another seed until it loaded the state, has the same bits."""
        own = {id(p) for p in self.model.parameters()}
        if any(id(p) not in own for p in self.every):
            return
        for hook in self.hooks:
            hook.remove()
        state = in_form(copy.deepcopy(self.opt.state_dict()), form, other % 500)
        model, params = copy.deepcopy((self.model, self.params))
        self.find_layers()
        options = {**self.options, "seed": other, "param_groups": [{"params": group} for group in params]}
        twin = type(self.opt)(model, **options)
        attempt(f"torch load_state_dict({form})", lambda: twin.load_state_dict(state), valid=True, inputs=state)
        twin.TCov, twin.error_if_nonfinite = self.TCov, self.opt.error_if_nonfinite
        copies = [p for group in params for p in group]
        for k, pair in enumerate(zip(self.every, copies)):
            g = make("torch", tuple(pair[0].shape), style.of(k, dtype_of(pair[0]))).array
            for p in pair:
                p.grad = g.clone() if p.requires_grad else None
        twin.step()
        self._step("torch step()", self.opt.step)
        assert held_by(twin.state_dict()) == held_by(self.opt.state_dict())
        assert [held_by(p) for p in copies] == [held_by(p) for p in self.every]

    @rule(how=st.sampled_from(["deepcopy", "pickle"]), adopt=st.booleans())
    def duplicate(self, how: str, adopt: bool) -> None:
        for hook in self.hooks:  # which are ours, not the optimizer's
            hook.remove()
        pair, pending = (self.model, self.opt), self.pending
        outcome = attempt(
            f"torch {how}()",
            lambda: copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair)),
            valid=not any(pending),
            state=self.everything,
        )
        if outcome.done:
            model, opt = outcome.result
            assert held_by(opt.state_dict()) == held_by(self.opt.state_dict())
            assert opt.skipped_refreshes() == self.opt.skipped_refreshes()
            assert [held_by(p) for p in model.parameters()] == [held_by(p) for p in self.model.parameters()]
            if adopt:
                self._adopt(model, opt)
        self.find_layers()
        self.pending = pending

    def _adopt(self, model: nn.Module, opt: Any) -> None:
        """Go on with a copy. Gradients are not copied."""
        self.old = self.every  # keeps their ids from being used again
        params = iter([p for group in opt.param_groups for p in group["params"]])
        self.params = [[next(params) for _ in group] for group in self.params]
        self.steps = {id(b): self.steps[id(a)] for a, b in zip(self.old, self.every) if id(a) in self.steps}
        self.model, self.opt = model, opt
        self.odd.clear()

    # Calls that are always refused

    @rule(fault=st.sampled_from([*sorted(BAD_ARGUMENTS), *NO_DIVISIONS]))
    def refused_construction(self, fault: str) -> None:
        arguments = {"model": self.model, **BAD_ARGUMENTS.get(fault, {})}
        if fault in NO_DIVISIONS:
            arguments["param_groups"] = NO_DIVISIONS[fault](self.model)
        attempt(f"torch AdaFisher({fault})", lambda: AdaFisher(**arguments), valid=False, inputs=self.everything)

    @precondition(lambda self: self.framework == "torch")  # else it may go well, which takes a GPU
    @rule()
    def capture(self) -> None:
        attempt("torch capture()", lambda: self.opt.capture(lambda: None), valid=False, inputs=self.everything)
