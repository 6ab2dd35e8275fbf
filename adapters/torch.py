"""PyTorch: `AdaFisher(model)` and `AdaFisherW(model)` in place of `AdamW(model.parameters())`.

The step is one kernel launch on torch's current stream; a sampled step refreshes the factors first, with two launches,
and its backward pass reads the layers, a launch for each large one or for several small ones. Between sampled steps no
hook is attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.arrays import refuse_without_memory, torch_view
from cafin_cupy.backend import choose, requested
from cafin_cupy.errors import BackendError, CafinError, CafinTypeError, refuse
from cafin_cupy.factors import Factors
from cafin_cupy.layers import Layer
from cafin_cupy.optimizer import make_factors, owners
from cafin_cupy.rule import DEFAULT_GAMMA, Averaging, Hyper, whole
from cafin_cupy.update import place

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
except ImportError:  # internal to torch, so they may go: then every step looks for hooks, as torch does
    _global_optimizer_pre_hooks = _global_optimizer_post_hooks = {0: None}  # type: ignore[assignment,dict-item]

from .torch_capture import RUN_FIRST, CapturedIteration, check_capture
from .torch_layers import Tap, describe
from .torch_plan import Plan
from .torch_scalars import checked_hyper, unscaling
from .torch_state import take_over, with_factors
from .torch_warnings import warn_unseen, warn_without_factors

__all__ = ["AdaFisher", "AdaFisherW"]

_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_backward_number = getattr(torch._C, "_current_graph_task_id", None)
_READ_BY_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
_SERVED = object()  # marks a `step` that serves hooks and profiler itself


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
        capturable: `step` may be captured in a CUDA graph (see `capture`): counters and scalars then live on the
            device, where a small launch ahead of the update's counts, and `lr` may be a float32 tensor there.
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
        capturable: bool = False,
        grad_scaler: Any = None,
    ) -> None:
        where = type(self).__name__
        if not isinstance(model, nn.Module):
            mend = "pass the model itself, not model.parameters()"  # type: ignore[unreachable]
            refuse(where, "model", "be a torch.nn.Module", type(model).__name__, mend, CafinTypeError)
        parameters = list(model.parameters())
        if not parameters:
            refuse(where, "model", "have parameters", "none")
        for name, p in model.named_parameters():
            if p.is_meta or (p.requires_grad and not p.is_floating_point()):
                got = f"{p.dtype} on {p.device}"
                refuse(
                    where, f"model ({name})", "have real floating-point parameters in memory", got, "convert it first"
                )
            if p.requires_grad or nn.parameter.is_lazy(p):
                refuse_without_memory(p, where, f"model ({name})")
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            refuse(where, "grad_scaler", "be a GradScaler", type(grad_scaler).__name__, kind=CafinTypeError)
        requested(backend, where)
        self.TCov = TCov
        self.averaging = Averaging.named(averaging, gamma)
        self.model = model
        self.steps = 0
        self.capturable = bool(capturable)
        self.grad_scaler = grad_scaler
        self._requested = backend
        self._reset()
        self._find_layers()
        defaults = {"lr": lr, "beta": beta, "Lambda": Lambda, "weight_decay": weight_decay}
        checked_hyper(self, where, defaults)
        _refuse_ranks(where)
        super().__init__(parameters, defaults)
        unowned = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in self._owners]
        warn_without_factors(where, unowned)
        self._attach()

    # Set-up

    def _reset(self) -> None:
        """Forget all that is derived from parameters, state and device."""
        self._kept_factors: Factors | None = None
        self._plan: Plan | None = None
        self._taps: list[Any] = []
        weakref.finalize(self, _detach, self._taps)
        self._captured: list[Plan] = []  # what CUDA graphs read
        self._warned = False
        self._flushed_after = -1  # number of the backward pass at whose end the factors' arrays are read
        self._seen: set[int] = set()  # layers that have ever been seen
        self._hypers: dict[Any, Hyper] = {}  # scalars that have been checked

    def _find_layers(self) -> None:
        """Descriptors in module order. Modules that hold the same weight and bias share the factors of the first."""
        self._layers, self._modules, shared = [], [], {}  # type: ignore[var-annotated]
        for name, module in self.model.named_modules():
            layer = describe(name, module)
            if layer is None:
                continue
            key = (type(layer), id(layer.weight), id(layer.bias), getattr(layer, "groups", 1))
            if key not in shared:
                shared[key] = len(self._layers)
                self._layers.append(layer)
            self._modules.append((name, module, shared[key], layer))
        self._owners = owners(self._layers)

    @property
    def _factors(self) -> Factors:
        """The factors, made when first needed, on the device where the model is by then."""
        if self._kept_factors is None:
            device = self._device()
            self._kept_factors = make_factors(self._layers, self.averaging, self.backend, device)
        return self._kept_factors

    def _trained(self) -> list[Tensor]:
        """The parameters that decide on device and backend: those that train, or have."""
        every = [p for group in self.param_groups for p in group["params"]]
        return [p for p in every if p.requires_grad or p in self.state] or every

    def _device(self) -> int | str:
        views = {torch_view(p, "step", "model").device for p in self._trained()}
        if len(views) != 1:
            got = sorted(map(place, views))
            refuse(type(self).__name__, "model", "lie on one device", got, "use one optimizer for each")
        return views.pop()

    @property
    def backend(self) -> str:
        """ "cuda" or "reference": what runs for the model where it is now."""
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self._trained()}
        return choose(self._requested, self._device(), dtypes, type(self).__name__)

    @property
    def TCov(self) -> int:
        """Every how many steps the factors are refreshed."""
        return self._TCov

    @TCov.setter
    def TCov(self, value: int) -> None:
        self._TCov = whole(type(self).__name__, "TCov", value, 1)
        if hasattr(self, "_taps"):
            self._attach()  # the coming step may have become a sampled one, or ceased to be
            if self._kept_factors is not None and not self.samples:
                self._kept_factors.discard()

    @property
    def samples(self) -> bool:
        """True if the next step refreshes the factors."""
        return self.steps % self._TCov == 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        self._plan = None

    # Factors

    def _attach(self) -> None:
        """Hooks live on sampled steps only."""
        if self.samples and not self._taps:
            self._taps[:] = [
                module.register_forward_hook(Tap(self, index, layer), with_kwargs=True)
                for _, module, index, layer in self._modules
            ]
        elif not self.samples:
            _detach(self._taps)

    def prepare(self) -> None:
        """Make the factors and compile the kernels now, rather than in autograd's thread."""
        if self._kept_factors is None:
            self._factors  # noqa: B018

    def _receive(self, index: int, h: Tensor, s: Tensor, layer: Layer | None) -> None:
        """From backward: a layer's input and output gradient."""
        if not self.samples:  # a late backward through a graph of an earlier, sampled step
            return
        capturing = h.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not self.capturable:
            raise BackendError(
                "backward: a CUDA graph must not capture a sampled step, whose sums the host counts; capture an "
                f"unsampled one, or use {type(self).__name__}(model, ..., capturable=True)"
            )
        self._seen.add(index)
        factors = self._factors
        if capturing:
            factors.hold()
        if factors.kernels:
            h, s = h.resolve_neg(), s.resolve_neg()
            h = h if h.dtype in _READ_BY_KERNELS else h.float()
            s = s if s.dtype in _READ_BY_KERNELS else s.float()
        if self._defers():
            factors.defer(index, h, s, layer)
        else:
            factors.accumulate(index, h, s, layer)

    def _defers(self) -> bool:
        """Arrange that what waits is read before `backward` returns, and a script may overwrite its input; False where
        that is not possible. Autograd changes no gradient in place that someone holds."""
        number = _backward_number() if _backward_number is not None else -1
        if number < 0:  # outside of a backward pass
            return False
        if number != self._flushed_after:
            torch.autograd.Variable._execution_engine.queue_callback(self._factors.flush)
            self._flushed_after = number
        return True

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{module name: (H, S)}: the moving averages themselves, on the model's device, not copies."""
        factors = self._factors
        return {name: (factors.H[index], factors.S[index]) for name, _, index, _ in self._modules}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the backward passes that made them have added to the factors' sums."""
        super().zero_grad(set_to_none)
        if self._kept_factors is not None:
            self._kept_factors.discard()

    # Step

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
        own = type(self).step
        if own is not AdaFisher.step and getattr(own, "hooked", None) is True:  # torch has wrapped a subclass's
            return self._step(closure)
        if closure is None and not (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiling()
        ):
            return self._step()
        return self._watched_step(closure)

    step.hooked = _SERVED  # type: ignore[attr-defined]  # torch must not wrap it

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if capturing:
            check_capture(self)
        verdict = unscaling(self)
        if verdict is None:
            self._factors.discard()
            return loss
        grad_scale, loss_scale = verdict
        plan = self._plan
        if plan is None or not plan.valid(self):
            if capturing:
                raise BackendError(RUN_FIRST)
            self._plan = plan = Plan(self)
        if capturing:
            self._captured.append(plan)  # a replay reads its tables
            plan.expect_capture()
        hypers = self._checked_hypers()
        grads = plan.gradients()
        if self.samples:
            self._refresh(loss_scale)
        plan.update(hypers, grads, grad_scale)
        self._count_steps(self.steps + 1)
        return loss

    def _checked_hypers(self) -> list[Hyper]:
        return [checked_hyper(self, "step", group) for group in self.param_groups]

    def _count_steps(self, steps: int) -> None:
        self.steps = steps
        if self._taps or self.samples:
            self._attach()

    def capture(self, iteration: Callable[[], Any]) -> CapturedIteration:
        """A function that trains as `iteration` does, replayed from CUDA graphs; needs `capturable=True`.

        Args:
            iteration: one whole iteration without arguments: `zero_grad`, forward, backward, `step`. It reads its data
                from tensors that the script fills in place, and does nothing on the host that must happen each time.

        Returns:
            A function to call once per iteration. The first calls run `iteration` as it is; then it is captured, once
            as a sampled step and once as an unsampled one. It returns what `iteration` returned, the same tensors with
            new content each time.

        Raises:
            BackendError: the optimizer is not capturable, or runs without the kernels.
        """
        if not self.capturable or self.backend != "cuda":
            rule = "the optimizer must be capturable and run on the CUDA backend"
            got = f"capturable={self.capturable}, backend {self.backend!r}"
            raise BackendError(f"capture: {rule}, got {got}; use {type(self).__name__}(model, ..., capturable=True)")
        return CapturedIteration(self, iteration)

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)  # calls hooks, and tells the profiler

    def _refresh(self, loss_scale: float) -> None:
        _refuse_ranks("step")
        unseen = [
            name for name, _, index, layer in self._modules if index not in self._seen and layer.weight.grad is not None
        ]
        if unseen and not self._warned:
            self._warned = True
            warn_unseen(type(self).__name__, unseen)
        self._factors.update(loss_scale)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The keys of the public implementation: `state`, `param_groups`, `steps`, `H_D`, `S_D` (in module order)."""
        return with_factors(self, super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over a `state_dict` of this class or of the public implementation. The caller's dict is not changed.

        Raises:
            CafinError: it does not fit; nothing has been changed then.
        """
        take_over(self, state_dict, super().load_state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._kept_factors is not None and self._kept_factors.pending:
            raise CafinError(
                f"{type(self).__name__}: a copy must be made between steps, got one between backward and step; "
                "call step() or zero_grad() first"
            )
        kept = ("model", "_TCov", "averaging", "steps", "capturable", "grad_scaler", "_requested")
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
