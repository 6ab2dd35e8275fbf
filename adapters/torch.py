"""PyTorch: `AdaFisher(model)` and `AdaFisherW(model)` in place of `AdamW(model.parameters())`.

The step is one kernel launch on torch's current stream; a sampled step refreshes the factors first, with two launches,
and each layer of its forward and backward costs one. Between sampled steps no hook is attached.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.arrays import current_stream, refuse_overlap, torch_view, view
from cafin_cupy.backend import choose, requested
from cafin_cupy.errors import BackendError, CafinError, CafinTypeError, refuse
from cafin_cupy.factors import Factors
from cafin_cupy.optimizer import make_factors, owners
from cafin_cupy.rule import DEFAULT_GAMMA, Averaging, Hyper, whole
from cafin_cupy.update import CudaUpdate, gather, layout, matching, place, reference_update, scalars, writable

from .torch_layers import Tap, describe

__all__ = ["AdaFisher", "AdaFisherW"]

_SCALARS = ("lr", "beta", "Lambda", "weight_decay")


class AdaFisher(torch.optim.Optimizer):
    """AdaFisher for a model: `g <- g + wd p;  m <- beta m + (1 - beta) g;  p <- p - lr / (1 - beta^t) m / F`.

    Layers with factors: Linear, Conv2d, BatchNorm2d, LayerNorm and their subclasses. Other parameters are updated with
    F = 1, and one warning names them. Per-parameter state is `step` (int) and `exp_avg` (like the parameter).

    Args:
        model: the module to train, not its parameters. On the CUDA backend its parameters are float32.
        lr: learning rate, >= 0; a number or a CPU tensor.
        beta: decay of the momentum, in [0, 1).
        Lambda: damping, > 0.
        gamma: decay of the factors, in [0, 1].
        TCov: the factors are refreshed on every TCov-th step, the first among them.
        weight_decay: >= 0.
        dist: accepted for compatibility; factors are not yet reduced over ranks, so several ranks are refused.
        averaging: "parity" (the public implementation's rule), "paper", or an `Averaging`.
        backend: "cuda", "reference", or None to choose by the parameters' device.
        grad_scaler: the `GradScaler` in use, needed only if the script calls its `unscale_` before `step`: the factors
            must know the scale.

    Raises:
        CafinError: an argument is refused.
    """

    _decoupled = False
    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and the inf verdict to `step`

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        beta: float = 0.9,
        Lambda: float = 1e-3,
        gamma: float = DEFAULT_GAMMA,
        TCov: int = 100,
        weight_decay: float = 0,
        dist: bool = False,
        *,
        averaging: str | Averaging = "parity",
        backend: str | None = None,
        grad_scaler: Any = None,
    ) -> None:
        where = type(self).__name__
        if not isinstance(model, nn.Module):
            mend = "pass the model itself, not model.parameters()"  # type: ignore[unreachable]
            refuse(where, "model", "be a torch.nn.Module", type(model).__name__, mend, CafinTypeError)
        parameters = list(model.parameters())
        if not parameters:
            refuse(where, "model", "have parameters", "none")
        requested(backend, where)
        self.TCov = whole(where, "TCov", TCov, 1)
        self.averaging = Averaging.named(averaging, gamma)
        self.model = model
        self.steps = 0
        self.grad_scaler = grad_scaler
        self._requested = backend
        self._reset()
        self._find_layers()
        defaults = {"lr": lr, "beta": beta, "Lambda": Lambda, "weight_decay": weight_decay}
        self._hyper(where, defaults)
        _refuse_ranks(where)
        super().__init__(parameters, defaults)
        self._warn_without_factors()
        self._attach()

    # Set-up

    def _reset(self) -> None:
        """Forget all that is derived from parameters, state and device."""
        self._kept_factors: Factors | None = None
        self._plan: _Plan | None = None
        self._taps: list[Any] = []
        self._warned = False

    def _find_layers(self) -> None:
        """Descriptors in module order. Modules that hold the same weight and bias share one descriptor."""
        self._layers, self._modules, shared = [], [], {}  # type: ignore[var-annotated]
        for name, module in self.model.named_modules():
            layer = describe(name, module)
            if layer is None:
                continue
            key = (type(layer), id(layer.weight), id(layer.bias))
            if key not in shared:
                shared[key] = len(self._layers)
                self._layers.append(layer)
            self._modules.append((name, module, shared[key]))
        self._owners = owners(self._layers)

    def _warn_without_factors(self) -> None:
        names = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in self._owners]
        if names:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            warnings.warn(f"{type(self).__name__}: no factors (F = 1) for {shown}", stacklevel=3)

    @property
    def _factors(self) -> Factors:
        """The factors, made when first needed, on the device where the model is by then."""
        if self._kept_factors is None:
            device = self._device()
            self._kept_factors = make_factors(self._layers, self.averaging, self.backend, device)
        return self._kept_factors

    def _device(self) -> int | str:
        views = {torch_view(p, "step", "model").device for group in self.param_groups for p in group["params"]}
        if len(views) != 1:
            refuse(
                type(self).__name__, "model", "lie on one device", sorted(map(str, views)), "use one optimizer for each"
            )
        return views.pop()

    @property
    def backend(self) -> str:
        """ "cuda" or "reference": what runs for the model where it is now."""
        dtypes = {str(p.dtype).removeprefix("torch.") for group in self.param_groups for p in group["params"]}
        return choose(self._requested, self._device(), dtypes, type(self).__name__)

    @property
    def samples(self) -> bool:
        """True if the next step refreshes the factors."""
        return self.steps % self.TCov == 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        self._plan = None

    # Factors

    def _attach(self) -> None:
        """Hooks live on sampled steps only."""
        if self.samples and not self._taps:
            self._taps = [
                module.register_forward_hook(Tap(self, index), with_kwargs=True) for _, module, index in self._modules
            ]
            weakref.finalize(self, _detach, self._taps)
        elif not self.samples:
            _detach(self._taps)

    def _receive(self, index: int, h: Tensor, s: Tensor) -> None:
        """From backward: a layer's input and output gradient."""
        factors = self._factors
        if factors.kernels and (h.dtype is not torch.float32 or s.dtype is not torch.float32):
            h, s = h.float(), s.float()
        factors.accumulate(index, h, s)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{module name: (H, S)}: the moving averages themselves, on the model's device, not copies."""
        factors = self._factors
        return {name: (factors.H[index], factors.S[index]) for name, _, index in self._modules}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the backward passes that made them have added to the factors' sums."""
        super().zero_grad(set_to_none)
        if self._kept_factors is not None:
            self._kept_factors.discard()

    # Step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient, in place, on the current stream.

        Under a `GradScaler` the gradients are unscaled on the way, and a step with non-finite gradients changes
        nothing; that verdict is read from the device, which waits, as for `torch.optim` without `fused=True`.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            CafinError: a gradient or scalar is refused; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is not None and self._plan.launch is not None and torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "step: a CUDA graph must not capture it, since a replay would repeat the same step number and lr; "
                "capture forward and backward, and call step() outside"
            )
        verdict = self._unscaling()
        if verdict is None:
            self._factors.discard()
            return loss
        grad_scale, loss_scale = verdict
        if self._plan is None or not self._plan.valid(self):
            self._plan = _Plan(self)
        hypers = [self._hyper("step", group) for group in self.param_groups]
        grads = self._plan.gradients()
        if self.samples:
            self._refresh(loss_scale, any(g is not None for g in grads))
        self._plan.update(hypers, grads, grad_scale)
        self.steps += 1
        if self._taps or self.samples:
            self._attach()
        return loss

    def _refresh(self, loss_scale: float, have_gradients: bool) -> None:
        _refuse_ranks("step")
        factors = self._factors
        if self._layers and have_gradients and not factors.pending and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: no layer was seen on a sampled step, so the factors stay as they are. Hooks "
                "do not run in a model compiled before the optimizer was made, nor do layers in eval mode count.",
                stacklevel=4,
            )
        factors.update(loss_scale)

    def _unscaling(self) -> tuple[float, float] | None:
        """(scale of the gradients, scale of the loss), or None if a scaler found non-finite gradients."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return 1.0, 1.0
        if float(found_inf):
            return None
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            return float(scale), float(scale)
        if self.samples and self._kept_factors is not None and self._kept_factors.pending:
            if self.grad_scaler is None:
                refuse(
                    "step", "grad_scaler", "be known where unscale_ is called before step", "None",
                    f"construct {type(self).__name__}(model, ..., grad_scaler=scaler)",
                )  # fmt: skip
            return 1.0, float(self.grad_scaler.get_scale())
        return 1.0, 1.0

    def _hyper(self, where: str, group: Mapping[str, Any]) -> Hyper:
        for name in _SCALARS:
            if isinstance(group[name], Tensor) and group[name].is_cuda:
                refuse(where, name, "be a number or a CPU tensor", f"a tensor on {group[name].device}", "pass .item()")
        lr, beta, Lambda, weight_decay = (group[name] for name in _SCALARS)
        return Hyper.checked(where, lr, beta, Lambda, weight_decay, self._decoupled)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The keys of the public implementation: `state`, `param_groups`, `steps`, `H_D`, `S_D` (in module order)."""
        factors = self._factors
        state = super().state_dict()
        state["H_D"] = [factors.H[index] for _, _, index in self._modules]
        state["S_D"] = [factors.S[index] for _, _, index in self._modules]
        state["steps"] = self.steps
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over a `state_dict` of this class or of the public implementation. The caller's dict is not changed.

        Raises:
            CafinError: it does not fit; nothing has been changed then.
        """
        H, S, steps = self._checked_state(state_dict)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for group in self.param_groups:
            for name in _SCALARS:
                group.setdefault(name, self.defaults[name])
        for state in self.state.values():
            if "step" in state:
                state["step"] = int(state["step"])
        factors = self._factors
        for place_, (_, _, index) in reversed(list(enumerate(self._modules))):  # the first of shared modules wins
            like = factors.H[index]
            factors.load(index, H[place_].to(like.device), S[place_].to(like.device))
        factors.discard()
        self.steps = steps
        self._attach()

    def _checked_state(self, state_dict: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], int]:
        where = "load_state_dict"
        for key in ("state", "param_groups", "H_D", "S_D", "steps"):
            if key not in state_dict:
                mend = "it must come from AdaFisher's state_dict()"
                refuse(where, "state_dict", f"have the key {key!r}", sorted(map(str, state_dict)), mend)
        found = []
        for key, size in (("H_D", "H_size"), ("S_D", "S_size")):
            tensors = list(state_dict[key])
            if len(tensors) != len(self._modules):
                refuse(where, key, f"hold {len(self._modules)} tensors, one for each layer", len(tensors))
            for (name, _, index), tensor in zip(self._modules, tensors):
                length = getattr(self._layers[index], size)
                if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (length,):
                    got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                    refuse(where, f"{key} of {name}", f"be a tensor of shape ({length},)", got)
            found.append(tensors)
        groups = state_dict["param_groups"]
        indices = [i for group in groups for i in group["params"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes:
            refuse(where, "param_groups", f"have groups of {sizes} parameters", [len(g["params"]) for g in groups])
        flat = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(indices, flat):
            average = state_dict["state"].get(i, {}).get("exp_avg")
            if average is not None and average.shape != p.shape:
                refuse(where, f"state[{i}]['exp_avg']", f"have shape {tuple(p.shape)}", tuple(average.shape))
        return found[0], found[1], whole(where, "steps", state_dict["steps"], 0)

    def __getstate__(self) -> dict[str, Any]:
        if self._kept_factors is not None and self._kept_factors.pending:
            raise CafinError(
                f"{type(self).__name__}: a copy must be made between steps, got one between backward and step; "
                "call step() or zero_grad() first"
            )
        kept = ("model", "TCov", "averaging", "steps", "grad_scaler", "_requested")
        factors = self._factors
        mine = {name: self.__dict__[name] for name in kept}
        return {**super().__getstate__(), "_copied": (mine, list(factors.H), list(factors.S))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        copied = state.pop("_copied", None)
        super().__setstate__(state)
        self._plan = None
        if copied is None:  # load_state_dict comes by here too
            return
        mine, H, S = copied
        self.__dict__.update(mine)
        self._reset()
        self._find_layers()
        for index, pair in enumerate(zip(H, S)):
            self._factors.load(index, *pair)
        self._attach()


class AdaFisherW(AdaFisher):
    """AdaFisher with decoupled weight decay: `p <- p - lr (m / (1 - beta^t) / F + wd p)`. See `AdaFisher`."""

    _decoupled = True


class _Plan:
    """What a step needs, gathered once: parameters, their state and factors, and the launch.

    It holds as long as parameters and momenta stay where they are.
    """

    def __init__(self, optimizer: AdaFisher) -> None:
        groups = optimizer.param_groups
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.group = [number for number, group in enumerate(groups) for _ in group["params"]]
        self.names = {id(p): name for name, p in optimizer.model.named_parameters()}
        factors = optimizer._factors
        device = optimizer._device()
        if factors.layers and view(factors.H[0]).device != device:
            rule = f"stay on {factors.H[0].device} where its state is"
            refuse("step", "model", rule, f"parameters on {place(device)}", "move the model before the first step")
        views = [torch_view(p, "step", self._name(p)) for p in self.params]
        for p, v in zip(self.params, views):
            writable("step", self._name(p), v)
        refuse_overlap("step", [(self._name(p), v) for p, v in zip(self.params, views)])
        self.states = [self._state(optimizer, p) for p in self.params]
        self.kept = optimizer.state
        places = [optimizer._owners.get(id(p)) for p in self.params]
        self.pairs = [
            pl and (factors.of_weight(pl[0]) if pl[1] == "weight" else factors.of_bias(pl[0])) for pl in places
        ]
        self.kinds = [(p.stride(), p.dtype) for p in self.params]
        self.zeros = [0] * len(self.params)
        self.uniform = self._uniform()
        self.complete = True  # the last gradients were
        self.p = [p.data_ptr() for p in self.params]
        self.m: list[int] = [state["exp_avg"].data_ptr() for state in self.states]
        self.device = device
        self.launch: CudaUpdate | None = None
        if factors.kernels:
            layouts, pointers = [], []
            for p, v, pair in zip(self.params, views, self.pairs):
                layouts.append(layout("step", self._name(p), v, pair[0].numel() if pair else 0))
                pointers.append((pair[0].data_ptr(), pair[1].data_ptr()) if pair else (0, 0))
            self.launch = CudaUpdate(layouts, pointers, self.params[0], int(device))

    def _name(self, p: Tensor) -> str:
        return self.names.get(id(p), "params")

    def _state(self, optimizer: AdaFisher, p: Tensor) -> dict[str, Any]:
        state = optimizer.state[p]
        state.setdefault("step", 0)
        average = state.get("exp_avg")
        if average is None:
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif average.device != p.device:
            rule = f"stay on {average.device} where its state is"
            refuse("step", self._name(p), rule, p.device, "move the model before the first step")
        elif average.stride() != p.stride():
            state["exp_avg"] = torch.empty_like(p, dtype=average.dtype).copy_(average)
        return state

    def valid(self, optimizer: AdaFisher) -> bool:
        """False if a parameter or the optimizer's state has been replaced since."""
        return (
            self.kept is optimizer.state
            and len(self.kept) == len(self.states)
            and [p.data_ptr() for p in self.params] == self.p
            and [state["exp_avg"].data_ptr() for state in self.states] == self.m
        )

    def gradients(self) -> list[Tensor | None]:
        """Every parameter's gradient, checked; strided ones are copied into their parameter's layout."""
        grads = [p.grad for p in self.params]
        self.complete = all(g is not None for g in grads)
        if [None if g is None or g.is_sparse else (g.stride(), g.dtype) for g in grads] == self.kinds:
            return grads
        for k, (p, g) in enumerate(zip(self.params, grads)):
            if g is not None:
                grads[k] = self._fitting(p, g)
        return grads

    def _fitting(self, p: Tensor, g: Tensor) -> Tensor:
        name = f"gradient of {self._name(p)}"
        v = torch_view(g, "step", name)
        if g.dtype != p.dtype:
            refuse("step", name, f"be {p.dtype} as its parameter", g.dtype, "convert it")
        fitting: Tensor = matching(v, torch_view(p, "step", name)).owner
        return fitting

    def count(self, grads: list[Tensor | None]) -> tuple[list[tuple[int, int]], list[int]]:
        """Count a step for each parameter that has a gradient.

        Returns:
            The different (group, step) there are, and which of them each parameter has.
        """
        if self.uniform is not None and self.complete:  # all parameters in step, the usual case
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
            pointers = [0 if g is None else g.data_ptr() for g in grads]
            self.launch(self.p, pointers, self.m, sets, which, current_stream(self.params[0], int(self.device)))
            return
        for p, g, state, pair, kind in zip(self.params, grads, self.states, self.pairs, which):
            if g is not None:
                number, t = kinds[kind]
                reference_update(p.detach(), g.detach(), state["exp_avg"], pair, hypers[number], t, grad_scale)


def _detach(taps: list[Any]) -> None:
    for handle in taps:
        handle.remove()
    taps.clear()


def _refuse_ranks(where: str) -> None:
    """Each rank would follow its own factors, and the replicas would drift apart."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise BackendError(
            f"{where}: the process group must have one rank, got {distributed.get_world_size()}; "
            "factors are not yet reduced over ranks"
        )
