"""What a step of the PyTorch optimizer needs, gathered once and used until something moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cafin_cupy import forks
from cafin_cupy.arrays import torch_stream, torch_view
from cafin_cupy.cuda_update import CudaSchedule, CudaUpdate, layout, rate, scalars
from cafin_cupy.errors import refuse
from cafin_cupy.interrupts import uninterrupted
from cafin_cupy.memory import Written, refuse_overlap
from cafin_cupy.precision import dtype_name
from cafin_cupy.rounding import Noise, step_noise
from cafin_cupy.rule import Hyper, steps_in
from cafin_cupy.spread import SpreadUpdate
from cafin_cupy.unchanged import Unchanged, traits
from cafin_cupy.update import gather, matching, place, writable
from cafin_cupy.verdict import Verdict

from .torch_checks import check_place, check_strangers
from .torch_flat import what_is_updated
from .torch_groups import check_groups
from .torch_inference import leaves_inference_mode
from .torch_internals import count_changes
from .torch_parallel import own_gradient, unsummed
from .torch_precision import master_of, momentum_of, steps_of, written_state
from .torch_ranks import refuse_join
from .torch_shards import local, local_average
from .torch_verdict import see_whether_refreshed

if TYPE_CHECKING:
    from .torch import AdaFisher

_ADDRESS, _GRADIENT = Tensor.data_ptr, attrgetter("grad")
_STEP, _AVERAGE = itemgetter("step"), itemgetter("exp_avg")


class Plan:
    """Parameters that have or had a gradient, their state and factors, and the launch.

    It holds as long as parameters and momenta stay where they are, and no other parameter gets a gradient.

    Args:
        optimizer: whose coming step it is for.
        before: the plan of the last step.
    """

    @leaves_inference_mode
    def __init__(self, optimizer: AdaFisher, before: Plan | None = None) -> None:
        check_groups("step", optimizer.param_groups)
        self.groups = groups = optimizer.param_groups
        self.model = optimizer.model
        self.listed = [list(group["params"]) for group in groups]
        every = [(number, p) for number, group in enumerate(groups) for p in group["params"]]
        active = [(number, p) for number, p in every if p.grad is not None or p in optimizer.state]
        order = {id(p): place for place, p in enumerate(optimizer.state)}  # new ones come behind
        active.sort(key=lambda pair: order.get(id(pair[1]), len(order)))
        self.idle = [p for _, p in every if p.grad is None and p not in optimizer.state]
        self.group: list[int] = [number for number, _ in active]
        self.owned: list[Tensor] = [p for _, p in active]
        self.params: list[Tensor] = list(map(local, self.owned))  # this rank's parts, where they are sharded
        self.whole = all(map(is_, self.params, self.owned))
        self.gradient_of: Callable[[Any], Any] = _GRADIENT if self.whole else partial(own_gradient, optimizer._team)
        joining = [p for _, p in every if p.requires_grad or p in optimizer.state]
        self.shares = what_is_updated(optimizer, self.owned, joining)
        self.parts, pairs, homes = self.shares.parts, self.shares.pairs, self.shares.homes
        alike = self.whole and all(map(is_, homes, self.owned))
        self.average_of: Callable[[Any], Any] = _AVERAGE if alike else local_average
        self.names = dict(zip(map(id, self.parts), self.shares.names))
        self.names.update(zip(map(id, chain(self.owned, self.params)), self.shares.labels * 2))
        views = [torch_view(p, "step", self._name(p)) for p in self.params]
        factors = optimizer._factors
        written = [(self._name(p), v) for p, v in zip(self.params, views)]
        written += written_state(optimizer, self.owned, self._name)
        for name, v in written:
            writable("step", name, v)
        refuse_overlap("step", written)
        parts = [torch_view(p, "step", name) for p, name in zip(self.parts, self.shares.names)]
        for v, pair, name in zip(parts, pairs, self.shares.names):
            check_place(name, v, pair, factors.kernels)
        self.precision = optimizer._precision
        self.launch: CudaUpdate | SpreadUpdate | None = None
        self.begun = [steps_of(optimizer, p, self._name(p)) for p in self.owned]
        averages = [momentum_of(optimizer, p, x, self._name(p)) for p, x in zip(self.owned, homes)]
        masters = [master_of(optimizer, p, x, self._name(p)) for p, x in zip(self.owned, homes)]
        numbers = {id(p): number for number, (_, p) in enumerate(every)}
        self.keys = self.shares.each([numbers[id(p)] for p in self.owned])
        if factors.kernels:
            layouts, pointers = [], []
            for name, v, pair, average in zip(self.shares.names, parts, pairs, self.shares.each(averages)):
                columns = pair[0].numel() if pair else 0
                layouts.append(layout("step", name, v, columns, dtype_name(average.dtype)))
                pointers.append((pair[0].data_ptr(), pair[1].data_ptr()) if pair else (0, 0))
            devices = [int(v.device) for v in parts]
            self.device = devices[0] if devices else 0
            if len(set(devices)) > 1 and optimizer.capturable:
                got, mend = f"on {', '.join(map(place, sorted(set(devices))))}", "leave capturable out"
                refuse("step", "model", "lie on one device if capturable", got, mend)
            at = self.shares.each([0 if w is None else local(w).data_ptr() for w in masters])
            if len(set(devices)) > 1:
                self.launch = SpreadUpdate(layouts, pointers, self.parts, devices, at, self.keys)
            elif devices:
                self.launch = CudaUpdate(layouts, pointers, self.parts[0], self.device, at, self.keys)
        for p, x in zip(self.owned, self.params):
            if not unsummed(optimizer._team, p):  # which takes all ranks, and is checked by `gradients`
                self._check(x, self.gradient_of(p))
        self.kept = optimizer.state
        self.states = states = self._states(optimizer, averages, masters)
        self.in_order = len(self.kept) == len(states)  # no state of a parameter that has left its group
        self.averages: list[Tensor] = list(map(self.average_of, states))
        self.masters = self.shares.each([local(w) for w in masters])
        self.have_master = [k for k, w in enumerate(masters) if w is not None]
        others = [torch_view(x, "step", "state") for x in (*self.averages, *self._their_masters(states))]
        self.written = Written([*views, *others])
        self.sizes = np.array([v.extent[1] - v.extent[0] for v in views], np.uint64)  # in bytes
        self.p, self.m = list(map(_ADDRESS, self.parts)), list(map(_ADDRESS, self.shares.momenta(self.averages)))
        self.addresses = list(map(_ADDRESS, (*self.params, *self.averages, *self._their_masters(states))))
        self.traits = traits(self.params)
        self.unchanged = Unchanged(self.params).check
        self.fitting: Callable[..., bool] | None = None  # knows gradients that can be used as they are
        self.zeros = [0] * len(self.parts)
        self.one_group = bool(self.params) and not any(self.group)
        self.schedule: CudaSchedule | None = None
        if (optimizer.capturable or optimizer._skips is not None) and isinstance(self.launch, CudaUpdate):
            self._count_on_device(states)
        else:
            for state, t in zip(states, self.begun):
                state["step"] = t
        self.complete = True  # every parameter had a gradient in the last step
        self.siblings: dict[int, Plan] = {} if before is None else before.siblings  # by the group of a call
        if not self.shares.alone:
            self.siblings[id(groups[0])] = self

    def _count_on_device(self, states: list[Any]) -> None:
        """Let each `step` be an element of one vector on the device."""
        steps = torch.tensor(self.begun, dtype=torch.int64, device=self.params[0].device)
        self.steps = list(steps.unbind())
        for state, step in zip(states, self.steps):
            state["step"] = step
        self.schedule = CudaSchedule(self.group, steps.data_ptr(), self.params[0], self.device)
        self.numbers = list(range(len(self.params)))
        self.reserve()  # for a script that captures by itself

    def _name(self, p: Tensor) -> str:
        return self.names.get(id(p), "params")

    def _states(
        self, optimizer: AdaFisher, averages: list[Tensor], masters: list[Tensor | None]
    ) -> list[dict[str, Any]]:
        states = [optimizer.state[p] for p in self.owned]
        for state, average, master in zip(states, averages, masters):
            state.setdefault("step", 0)
            state["exp_avg"] = average
            if master is not None:
                state["master"] = master
            elif self.precision.masters:
                state.pop("master", None)  # of a parameter that was of 16 bits
        return states

    def _their_masters(self, states: list[Any]) -> list[Tensor]:
        return [local(states[k]["master"]) for k in self.have_master]

    def _find_states(self) -> list[Any]:
        """The state of each parameter."""
        return list(self.kept.values()) if self.in_order else [self.kept[p] for p in self.owned]

    def of_other_groups(self, optimizer: AdaFisher) -> Plan | None:
        """The plan of a step's next call, where it comes in several; None if there is none that is valid."""
        other = self.siblings.get(id(next(iter(optimizer.param_groups), None))) if self.siblings else None
        return other if other is not None and other.valid(optimizer) else None

    def valid(self, optimizer: AdaFisher) -> bool:
        """False if a parameter or its state has been replaced since, another parameter has a gradient, or the ranks
        that divide the state have formed another process group."""
        if self.kept is not optimizer.state or (self.in_order and len(self.kept) != len(self.params)):
            return False
        try:
            if not self.shares.hold(optimizer):
                return False
            groups = optimizer.param_groups
            if len(groups) != len(self.listed):
                return False
            for group, listed in zip(groups, self.listed):
                params = group["params"]
                if len(params) != len(listed) or not all(map(is_, params, listed)):
                    return False
            self.states = states = self._find_states()
            parts = self.owned if self.whole else map(local, self.owned)
            # The old momenta are kept, so others lie elsewhere.
            masters = self._their_masters(states) if self.have_master else ()
            addresses = list(map(_ADDRESS, chain(parts, map(self.average_of, states), masters)))
            counts = list(map(_STEP, states)) if self.schedule is not None else []
        except (KeyError, TypeError, RuntimeError):  # a script has put something else there: a new plan will say what
            return False
        return (
            addresses == self.addresses
            and (self.schedule is None or all(map(is_, counts, self.steps)))
            and (self.unchanged(*self.params) or self._as_before())
            and not (self.idle and any(p.grad is not None for p in self.idle))
        )

    def _as_before(self) -> bool:
        """False if a parameter has changed under its address, as by `p.data = p.data.t()`."""
        if traits(self.params) != self.traits:
            return False
        self.unchanged = Unchanged(self.params).check
        return True

    def gradients(self) -> list[Tensor | None]:
        """Every parameter's gradient, checked; strided ones are copied into their parameter's layout. For a plan that
        is new or `valid`.

        Runs on every step, so the usual case is told from all others by two passes in C.
        """
        grads: list[Any] = list(map(self.gradient_of, self.owned))
        if self.fitting is not None and self.fitting(*grads):
            self.complete = True
            return grads if self.launch is not None else self._apart(grads)
        found = list(grads)
        for k, (p, g, mine, wanted) in enumerate(zip(self.params, found, traits(found), self.traits)):
            if g is None:
                continue
            if mine != wanted or not g.data_ptr() or g.data_ptr() % g.element_size():  # a sparse one has no address
                grads[k] = self._fitting(p, g)
        self._apart(grads)
        self.complete = all(g is not None for g in grads)
        if not any(g is not None for g in grads):
            check_strangers(self.model, self.listed)
        self.fitting = Unchanged(grads).check if self.complete and all(map(is_, found, grads)) else None
        return grads

    def _apart(self, grads: list[Any]) -> list[Any]:
        """Copy gradients that share memory with a parameter or momentum, as a function's backward may return them:
        others are updated before these are read."""
        starts = np.array([0 if g is None else g.data_ptr() for g in grads], np.uint64)
        for k in self.written.touched(starts, starts + self.sizes):
            grads[k] = grads[k].clone()
        return grads

    def _check(self, p: Tensor, g: Tensor | None) -> None:
        """Refuse a gradient that cannot update its parameter."""
        name = f"gradient of {self._name(p)}"
        if g is None:
            return
        torch_view(g.resolve_neg(), "step", name)
        if g.dtype != p.dtype or g.device != p.device or g.shape != p.shape:
            rule = f"be {p.dtype} of shape {tuple(p.shape)} on {p.device} as its parameter"
            refuse("step", name, rule, f"{g.dtype} of shape {tuple(g.shape)} on {g.device}", "convert it")

    def _fitting(self, p: Tensor, g: Tensor) -> Tensor:
        g = g.resolve_neg()  # its memory may hold the opposite sign
        self._check(p, g)
        name = f"gradient of {self._name(p)}"
        fitting: Tensor = matching(torch_view(g, "step", name), torch_view(p, "step", name)).owner
        return fitting

    def count(
        self, states: list[Any], grads: list[Tensor | None]
    ) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """The coming step of each parameter that has a gradient.

        Returns:
            The different (group, step) there are, which of them each part has, and the steps; no list of steps if all
            parameters are at the same one.
        """
        try:
            steps = list(map(_STEP, states))
        except KeyError:  # of a state that the script has emptied in part
            steps = [state.setdefault("step", 0) for state in states]
        first = steps[0] if steps else 0
        if not (type(first) is int and first >= 0 and steps.count(first) == len(steps)):
            steps = [steps_in("step", f"step of {self._name(p)}", t) for p, t in zip(self.params, steps)]
        elif self.complete and self.one_group:  # the usual case
            return [(0, first + 1)], self.zeros, []
        steps = [t + (g is not None) for t, g in zip(steps, grads)]
        kinds, which = gather([(number, max(1, t)) for number, t in zip(self.group, steps)])
        return kinds, self.shares.each(which), steps

    def step(self, *arguments: Any) -> None:
        """`update`; where ranks divide the state, each of its rows, which all then send each other."""
        exchange = self.shares.exchange
        if exchange is None:
            self.update(*arguments)
            return
        refuse_join(exchange.wrappers)
        with uninterrupted():  # the others wait for what has been updated
            self.update(*arguments)
            exchange()

    def update(
        self,
        optimizer: AdaFisher,
        hypers: list[Hyper],
        grads: list[Tensor | None],
        grad_scale: float,
        ahead: Callable[[], None] | None = None,
        capturing: bool = False,
        verdict: Verdict | None = None,
    ) -> None:
        """Update the parameters that have a gradient, and count the step: both or neither, whatever comes in between.

        `ahead` writes the factors that the update reads, once all is ready. If the update itself then fails, they stay,
        and `Factors.refreshed` tells the next step. A `verdict` is read on the device, which may do neither: see
        `AdaFisher.steps`.
        """
        steps = optimizer._steps + 1
        if self.schedule is not None:
            self._scheduled(optimizer, hypers, grads, grad_scale, ahead, capturing, verdict)
            return
        states, begin = self.states, optimizer._precision.begin
        kinds, which, counts = self.count(states, grads)

        def counted() -> None:
            if self.launch is not None:
                count_changes(self.params)
            if counts:
                for state, t in zip(states, counts):
                    state["step"] = t
            elif kinds:
                t = kinds[0][1]
                for state in states:
                    state["step"] = t
            if self.shares.ends:
                optimizer._count_steps(steps)

        if self.launch is not None:
            sets = [scalars(hypers[number], t, grad_scale, begin) for number, t in kinds]
            self._launch(grads, sets, which, ahead, counted)
            return
        with uninterrupted():  # what is computed in place, piece by piece, cannot be taken back
            if ahead is not None:
                ahead()
            averages = self.shares.momenta(list(map(self.average_of, states)))
            every = zip(self.parts, self.shares.of(grads), averages, self.shares.pairs, which, self.masters, self.keys)
            for p, g, average, pair, kind, master, key in every:
                if g is not None:
                    number, t = kinds[kind]
                    noise = Noise(step_noise(begin, t), key) if begin else None
                    update = p.detach(), g.detach(), average, pair, hypers[number], t, grad_scale
                    optimizer._reference(id(p), *update, master, noise)
            optimizer._reference.over()
            counted()

    def _scheduled(
        self,
        optimizer: AdaFisher,
        hypers: list[Hyper],
        grads: list[Tensor | None],
        grad_scale: float,
        ahead: Callable[[], None] | None,
        capturing: bool,
        verdict: Verdict | None,
    ) -> None:
        """`update` with counters on the device. A launch ahead of the update advances them, and back if it fails."""
        schedule, steps, stream = self.schedule, optimizer._steps + 1, self._stream()
        assert schedule is not None
        present = [g is not None for g in grads]
        unsure = optimizer._unsure + 1
        # If the step is a sampled one and does not happen, so is the next: the host will ask.
        told = optimizer._readback if optimizer._may_sample and optimizer.TCov > 1 else None
        self.refresh(hypers, grad_scale)

        def first() -> None:
            if ahead is not None:
                ahead()
            schedule(present, stream, verdict or Verdict())
            if verdict is not None and told is not None:
                optimizer._told = None  # known again once the step is counted
                told.start(verdict.skipped, stream)

        def counted() -> None:
            count_changes(self.params)
            schedule.updated()
            if verdict is not None:
                optimizer._unsure, optimizer._told = unsure, told
            optimizer._count_steps(steps)

        try:
            self._launch(grads, schedule.hypers, self.numbers, first, counted)
        except BaseException:
            if capturing:  # then nothing has run
                schedule.updated()
            else:
                schedule.take_back(stream)
                if verdict is not None:
                    see_whether_refreshed(optimizer)
            raise

    def _stream(self) -> int:
        """`current_stream`, without its questions."""
        if forks.child:
            forks.refuse_child("step")
        return torch_stream(self.device)

    def _launch(
        self,
        grads: list[Tensor | None],
        sets: Any,
        which: list[int],
        ahead: Callable[[], None] | None,
        counted: Callable[[], None],
    ) -> None:
        assert self.launch is not None
        if self.complete:
            addresses = list(map(_ADDRESS, grads))  # type: ignore[arg-type]
        else:
            addresses = [g.data_ptr() if g is not None else 0 for g in grads]
        addresses = self.shares.addresses(addresses)
        self.launch(self.p, addresses, self.m, sets, which, self._stream(), ahead, counted)

    def refresh(self, hypers: list[Hyper], grad_scale: float = 1.0) -> None:
        """Tell the device the scalars of a capturable optimizer's groups."""
        assert self.schedule is not None
        rates = []
        for group, hyper in zip(self.groups, hypers):
            lr = group["lr"]
            lr_at = lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda else 0
            rates.append(rate(hyper, grad_scale, lr_at, self.precision.begin))
        self.schedule.refresh(rates, self._stream())

    def expect_capture(self) -> None:
        """See `CudaUpdate.expect_capture`."""
        if isinstance(self.launch, CudaUpdate):
            self.launch.expect_capture()

    def reserve(self) -> None:
        """Provide what a capture of the step will keep."""
        if isinstance(self.launch, CudaUpdate):
            self.launch.reserve()
