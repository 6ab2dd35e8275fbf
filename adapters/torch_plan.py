"""What a step of the PyTorch optimizer needs, gathered once and used until something moves."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cafin_cupy.arrays import current_stream, refuse_overlap, torch_view, view
from cafin_cupy.errors import refuse
from cafin_cupy.rule import Hyper
from cafin_cupy.update import CudaUpdate, gather, layout, matching, place, reference_update, scalars, writable

if TYPE_CHECKING:
    from .torch import AdaFisher

_ADDRESS, _CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous
_GRADIENT, _DTYPE, _SHAPE, _STEP = attrgetter("grad"), attrgetter("dtype"), attrgetter("shape"), itemgetter("step")


class Plan:
    """Parameters that have or had a gradient, their state and factors, and the launch.

    It holds as long as parameters and momenta stay where they are, and no other parameter gets a gradient.
    """

    def __init__(self, optimizer: AdaFisher) -> None:
        groups = optimizer.param_groups
        every = [(number, p) for number, group in enumerate(groups) for p in group["params"]]
        active = [(number, p) for number, p in every if p.grad is not None or p in optimizer.state]
        self.idle = [p for _, p in every if p.grad is None and p not in optimizer.state]
        self.group: list[int] = [number for number, _ in active]
        self.params: list[Tensor] = [p for _, p in active]
        self.names = {id(p): name for name, p in optimizer.model.named_parameters()}
        factors = optimizer._factors
        self.device = optimizer._device()
        if factors.layers and view(factors.H[0]).device != self.device:
            rule = f"stay on {place(view(factors.H[0]).device)} where its state is"
            refuse("step", "model", rule, f"parameters on {place(self.device)}", "move the model before the first step")
        views = [torch_view(p, "step", self._name(p)) for p in self.params]
        for p, v in zip(self.params, views):
            writable("step", self._name(p), v)
        refuse_overlap("step", [(self._name(p), v) for p, v in zip(self.params, views)])
        places = [optimizer._owners.get(id(p)) for p in self.params]
        self.pairs = [
            pl and (factors.of_weight(pl[0]) if pl[1] == "weight" else factors.of_bias(pl[0])) for pl in places
        ]
        for p, pair in zip(self.params, self.pairs):
            if pair is not None and pair[0].numel() * pair[1].numel() != p.numel():
                rule = f"have {pair[1].numel()} x {pair[0].numel()} elements, as its layer had"
                refuse("step", self._name(p), rule, tuple(p.shape), "make a new optimizer")
        self.launch: CudaUpdate | None = None
        if factors.kernels:
            layouts, pointers = [], []
            for p, v, pair in zip(self.params, views, self.pairs):
                if p.dtype is not torch.float32:  # the kernels would read its memory as float32
                    refuse("step", self._name(p), "stay float32 as at the first step", p.dtype, "make a new optimizer")
                layouts.append(layout("step", self._name(p), v, pair[0].numel() if pair else 0))
                pointers.append((pair[0].data_ptr(), pair[1].data_ptr()) if pair else (0, 0))
            if self.params:
                self.launch = CudaUpdate(layouts, pointers, self.params[0], int(self.device))
        for p in self.params:
            self._check(p, p.grad)
        self.kept = optimizer.state
        self.states = [self._state(optimizer, p) for p in self.params]
        self.entries = list(self.kept.values())
        self.averages: list[Tensor] = [state["exp_avg"] for state in self.states]
        self.p, self.m = list(map(_ADDRESS, self.params)), list(map(_ADDRESS, self.averages))
        self.shapes, self.strides = [p.shape for p in self.params], [p.stride() for p in self.params]
        self.dtypes = {p.dtype for p in self.params}
        self.alike = len(self.dtypes) == 1 and all(p.is_contiguous() for p in self.params)
        self.zeros = [0] * len(self.params)
        self.uniform = self._uniform()
        self.complete = True  # every parameter had a gradient in the last step

    def _name(self, p: Tensor) -> str:
        return self.names.get(id(p), "params")

    def _state(self, optimizer: AdaFisher, p: Tensor) -> dict[str, Any]:
        state = optimizer.state[p]
        state.setdefault("step", 0)
        average = state.get("exp_avg")
        if average is None:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif average.device != p.device or average.shape != p.shape:
            rule = f"stay of shape {tuple(average.shape)} on {average.device}, as its momentum is"
            got = f"{tuple(p.shape)} on {p.device}"
            refuse("step", self._name(p), rule, got, "make a new optimizer, or move the model before the first step")
        elif average.stride() != p.stride():
            state["exp_avg"] = torch.empty_like(p, dtype=average.dtype).copy_(average)
        return state

    def valid(self, optimizer: AdaFisher) -> bool:
        """False if a parameter or the optimizer's state has been replaced since."""
        return (
            self.kept is optimizer.state
            and len(self.kept) == len(self.entries)
            and all(map(is_, self.kept.values(), self.entries))
            and all(map(is_, [state.get("exp_avg") for state in self.states], self.averages))
            and list(map(_ADDRESS, self.params)) == self.p
            and list(map(_SHAPE, self.params)) == self.shapes
            and self._laid_as_before()
            and not any(p.grad is not None for p in self.idle)
        )

    def _laid_as_before(self) -> bool:
        """False if a parameter's memory is read in another order or type, as after `p.data = p.data.t()`."""
        if set(map(_DTYPE, self.params)) != self.dtypes:
            return False
        if self.alike:
            return all(map(_CONTIGUOUS, self.params))
        return [p.stride() for p in self.params] == self.strides

    def gradients(self) -> list[Tensor | None]:
        """Every parameter's gradient, checked; strided ones are copied into their parameter's layout.

        Runs on every step, so the usual case is told from all others by a few passes in C.
        """
        grads: list[Any] = list(map(_GRADIENT, self.params))
        self.complete = not any(map(is_, grads, repeat(None)))
        if self.complete and self.alike and set(map(_DTYPE, grads)) == self.dtypes and all(map(_CONTIGUOUS, grads)):
            return grads
        for k, (p, g) in enumerate(zip(self.params, grads)):
            if g is not None and (g.is_sparse or g.stride() != p.stride() or g.dtype is not p.dtype):
                grads[k] = self._fitting(p, g)
        return grads

    def _check(self, p: Tensor, g: Tensor | None) -> None:
        """Refuse a gradient that cannot update its parameter."""
        name = f"gradient of {self._name(p)}"
        if g is None:
            return
        torch_view(g, "step", name)
        if g.dtype != p.dtype or g.device != p.device or g.shape != p.shape:
            rule = f"be {p.dtype} of shape {tuple(p.shape)} on {p.device} as its parameter"
            refuse("step", name, rule, f"{g.dtype} of shape {tuple(g.shape)} on {g.device}", "convert it")

    def _fitting(self, p: Tensor, g: Tensor) -> Tensor:
        self._check(p, g)
        name = f"gradient of {self._name(p)}"
        fitting: Tensor = matching(torch_view(g, "step", name), torch_view(p, "step", name)).owner
        return fitting

    def count(self, grads: list[Tensor | None]) -> tuple[list[tuple[int, int]], list[int]]:
        """Count a step for each parameter that has a gradient.

        Returns:
            The different (group, step) there are, and which of them each parameter has.
        """
        steps = list(map(_STEP, self.states))
        if self.complete and self.uniform is not None and steps.count(self.uniform) == len(steps):  # the usual case
            self.uniform += 1
            for state in self.states:
                state["step"] = self.uniform
            return [(0, self.uniform)], self.zeros
        for state, g in zip(self.states, grads):
            state["step"] += g is not None
        self.uniform = self._uniform()
        return gather([(number, max(1, state["step"])) for number, state in zip(self.group, self.states)])

    def _uniform(self) -> int | None:
        """The step that all parameters have, if there is one group and they have."""
        steps = {state["step"] for state in self.states}
        return steps.pop() if len(steps) == 1 and not any(self.group) else None

    def update(self, hypers: list[Hyper], grads: list[Tensor | None], grad_scale: float) -> None:
        """Count the steps of the parameters that have a gradient, and update them."""
        kinds, which = self.count(grads)
        if self.launch is not None:
            sets = [scalars(hypers[number], t, grad_scale) for number, t in kinds]
            pointers = [g.data_ptr() if g is not None else 0 for g in grads]
            self.launch(self.p, pointers, self.m, sets, which, current_stream(self.params[0], int(self.device)))
            torch.autograd.graph.increment_version(self.params)  # a graph that saved old values must notice
            return
        for p, g, state, pair, kind in zip(self.params, grads, self.states, self.pairs, which):
            if g is not None:
                number, t = kinds[kind]
                reference_update(p.detach(), g.detach(), state["exp_avg"], pair, hypers[number], t, grad_scale)
