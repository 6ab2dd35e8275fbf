"""The machine of `AdaFisher` on raw arrays: what a script changes between steps, copies, and state dicts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cafin_cupy import AdaFisher

from .array_run import KEPT, ArrayRun
from .arrays import Held, Outline, Style, bits, make, styles, value
from .bad import DRESS, bad_scalars
from .calls import attempt
from .expected import Scalars
from .functions import DRESSES, SCALARS, tree
from .states import spoiled_arrays

LISTS = ("momenta", "masters", "H", "S")  # of a state dict


class Optimizer(ArrayRun):
    @rule(watch=st.booleans())
    def watch(self, watch: bool) -> None:
        self.opt.error_if_nonfinite = watch

    @rule()
    def discard(self) -> None:
        attempt("discard()", self.opt.discard, valid=True, inputs=self.everything)
        self.pending = [[] for _ in self.layers]

    @rule(seed=st.integers(0, 99))
    def start_again(self, seed: int) -> None:
        """New parameters, in place, which a run that has diverged needs."""
        for k, held in enumerate(self.p):
            held.array[...] = make(
                self.framework, tuple(held.array.shape), Style(dtype=self.dtype, seed=seed).of(k)
            ).array
            self.opt.momenta[k][...] = 0.0

    @rule(x=SCALARS, dress=DRESSES)
    def change_scalars(self, x: Scalars, dress: tuple[str, str]) -> None:
        values = {**vars(x), dress[0]: DRESS[dress[1]](getattr(x, dress[0]))}
        for name, number in values.items():
            setattr(self.opt, name, number)
        self.x = Scalars(**{name: type(getattr(x, name))(float(number)) for name, number in values.items()})

    @rule(name=st.sampled_from(KEPT), which=st.integers(0, 40))
    def spoil_a_scalar(self, name: str, which: int) -> None:
        good, wrong = getattr(self.opt, name), list(bad_scalars(name).values())
        setattr(self.opt, name, wrong[which % len(wrong)])
        grads = [make(self.framework, tuple(p.array.shape), Style(dtype=self.dtype)) for p in self.p]
        given = tree([g.array for g in grads], self.form)
        attempt(
            f"step with {name}", lambda: self.opt.step(given), valid=False, inputs=[grads, given], state=self.everything
        )
        setattr(self.opt, name, good)

    @rule(
        TCov=st.sampled_from([1, 2, 3, 100]), fault=st.one_of(st.none(), st.sampled_from(sorted(bad_scalars("TCov"))))
    )
    def change_TCov(self, TCov: int, fault: str | None) -> None:
        given = TCov if fault is None else bad_scalars("TCov")[fault]
        outcome = attempt(
            "TCov", lambda: setattr(self.opt, "TCov", given), valid=fault is None, inputs=self.p, state=self.everything
        )
        if outcome.done:
            self.TCov = TCov
            if not self.samples:
                self.pending = [[] for _ in self.layers]

    @rule()
    def save(self) -> None:
        state = attempt("state_dict()", self.opt.state_dict, valid=True, inputs=self.everything).result
        H, S = (list(part) for part in zip(*self.named_factors())) if self.layers else ([], [])
        own = {"steps": self.t, "momenta": self.opt.momenta, "H": H, "S": S}
        own |= {"masters": self.opt.masters} if self.precision.get("master_weights") else {}
        seed = state.pop("seed", None)
        assert seed == (self.precision["seed"] if self.precision.get("stochastic_rounding") else None)
        assert {k: v if k == "steps" else list(map(id, v)) for k, v in state.items()} == {
            k: v if k == "steps" else list(map(id, v)) for k, v in own.items()
        }
        state |= {} if seed is None else {"seed": seed}
        self.saved = [*self.saved[-2:], copy.deepcopy(state)]

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 2), own=st.booleans(), fault=st.one_of(st.none(), st.integers(0, 400)))
    def load(self, which: int, own: bool, fault: int | None) -> None:
        state = self.opt.state_dict() if own else self.saved[which % len(self.saved)]
        given = state if fault is None else spoiled_arrays(state, fault)
        want = {key: [a if a is None else value(a) for a in state[key]] for key in LISTS if key in state}
        outcome = attempt(
            "load_state_dict()" if fault is None else "load_state_dict(fault)",
            lambda: self.opt.load_state_dict(given),
            valid=fault is None,
            inputs=[*self.saved, Outline(state), self.p],
            state=self.everything,
        )
        if not outcome.done:
            return
        self.t = int(state["steps"])
        self.pending = [[] for _ in self.layers]
        self.skips = [0] * len(self.layers)
        now = self.opt.state_dict()
        for key, arrays in want.items():
            for got, right in zip(now[key], arrays):
                assert right is None or np.array_equal(value(got), right, equal_nan=True)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]), adopt=st.booleans())
    def duplicate(self, how: str, adopt: bool) -> None:
        held = {
            name: [h.array for h in self.p] if name == "p" else [layer for _, layer in self.layers] for name in "pl"
        }
        source = self.opt, held
        waits = any(self.pending)
        outcome = attempt(
            f"{how}()",
            lambda: copy.deepcopy(source) if how == "deepcopy" else pickle.loads(pickle.dumps(source)),
            valid=None if waits else True,
            state=self.everything,
            inputs=[self.p],
        )
        assert not (outcome.done and waits), "a copy has lost sums"
        if not outcome.done:
            return
        twin, copied = outcome.result
        mine, theirs = (
            [[value(a) for a in arrays if a is not None] for arrays in state.values() if isinstance(arrays, list)]
            for state in (self.opt.state_dict(), twin.state_dict())
        )
        assert twin.steps == self.t
        assert list(twin.skipped_refreshes().values()) == self.skips
        for one, other in zip(mine, theirs):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
        if adopt:
            self.opt = twin
            self.p = [Held(array) for array in copied["p"]]
            self.layers = [(layer, made) for (layer, _), made in zip(self.layers, copied["l"])]

    @precondition(lambda self: not any(self.pending))
    @rule(other=st.sampled_from([None, 0, 7, 2**63]), g=styles(("contiguous",)))
    def resume(self, other: int | None, g: Style) -> None:
        """The next step of a copy, or of an optimizer that has had another seed until it loaded the state, has the same
        bits."""
        if other is None:
            twin, p = copy.deepcopy((self.opt, [held.array for held in self.p]))
        else:
            state = copy.deepcopy(self.opt.state_dict())
            p, layers = copy.deepcopy(([held.array for held in self.p], [layer for _, layer in self.layers]))
            options = {name: getattr(self.opt, name) for name in (*KEPT, "decoupled", "TCov", "averaging")}
            twin = AdaFisher(tree(p, self.form), layers, **options, **{**self.precision, "seed": other})
            attempt("load_state_dict()", lambda: twin.load_state_dict(state), valid=True, inputs=[state, p])
        twin.error_if_nonfinite = self.opt.error_if_nonfinite
        style = Style(g.layout, g.values, self.dtype, g.seed)
        grads = [self._any_array(style, tuple(array.shape), k).array for k, array in enumerate(p)]
        twin.step(tree(grads, self.form))
        self.step(g, 1.0, None, 0)
        for one, another in (
            (p, [held.array for held in self.p]),
            *((getattr(twin, name), getattr(self.opt, name)) for name in ("momenta", "masters")),
            *zip(twin.factors().values(), self.opt.factors().values()),
        ):
            assert [a if a is None else bits(a) for a in one] == [a if a is None else bits(a) for a in another]
