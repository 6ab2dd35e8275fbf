"""PyTorch: `AdaFisher(model)` and `AdaFisherW(model)` in place of `AdamW(model.parameters())`.

The step is one kernel launch on torch's current stream; a sampled step refreshes the factors first, with two launches,
and its backward pass reads the layers, a launch for each large one or for several small ones. Between sampled steps no
hook is attached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.backend import requested
from cafin_cupy.cuda_factors import CudaFactors
from cafin_cupy.curvature import Curvature, look
from cafin_cupy.errors import BackendError, refuse
from cafin_cupy.precision import Precision, checked_seed
from cafin_cupy.rule import DEFAULT_GAMMA, Averaging, Hyper, flag
from cafin_cupy.summary import Summary, summarise
from cafin_cupy.verdict import Verdict

from .torch_capture import RUN_FIRST, CapturedIteration, check_capture
from .torch_checks import check_callable, check_finite, check_model, check_momenta
from .torch_flat import refuse_by_hand, refuse_flat
from .torch_groups import Group, check_arguments, check_groups, groups_of
from .torch_inference import leaves_inference_mode
from .torch_internals import global_post_hooks, global_pre_hooks, profiling
from .torch_joining import join
from .torch_kinds import register_layer, unregister_layer
from .torch_parallel import check_team, refuse_scaler
from .torch_parts import held, over_parts, parts, rates
from .torch_plan import Plan
from .torch_ranks import check_dist, check_divide_factor, check_every_of, compare_from_now_on, meet
from .torch_sampling import Sampling
from .torch_scalars import check_scaler, checked_hyper, checked_hypers, forget_scale, unscaling
from .torch_shards import check_options
from .torch_state import copied, go_on_from, take_momentum, take_over, with_factors
from .torch_verdict import verdict_of_device
from .torch_warnings import warn_unseen, warn_without_factors
from .torch_wrappers import itself
from .torch_zero import check_shard_state, refuse_shared

__all__ = ["AdaFisher", "AdaFisherW", "register_layer", "unregister_layer"]

_SERVED = object()  # marks a `step` that serves hooks and profiler itself


class AdaFisher(Sampling):
    """AdaFisher for a model: `g <- g + wd p;  m <- beta m + (1 - beta) g;  p <- p - lr / (1 - beta^t) m / F`.

    Layers with factors: Linear, Embedding, convolutions, transposed ones too, the norm layers (batch, group, instance,
    layer, RMS), MultiheadAttention, the Conv1D of transformers, their subclasses, and what `register_layer` adds. Other
    parameters are updated with F = 1, and one warning names them. Per-parameter state is `step` (int), `exp_avg` (the
    momentum) and, with master weights, `master`.

    Args:
        model: the module to train, not its parameters. On the CUDA backend its parameters are float32, bfloat16 or
            float16. It may be spread over several GPUs.
        lr: learning rate, >= 0; a number or a CPU tensor.
        beta: decay of the momentum, in [0, 1).
        Lambda: damping, > 0.
        gamma: decay of the factors, in [0, 1].
        TCov: the factors are refreshed on every TCov-th step, the first among them.
        weight_decay: >= 0.
        dist: whose curvature the factors follow: None for that of all ranks that train together, which are those of a
            model in `DistributedDataParallel` or `fully_shard`, else of the default process group if there is one; True
            for the same; a process group; False for this process alone. The script, or the wrapper, averages the
            gradients.
        gradient_divide_factor: what the sum of the ranks' gradients is divided by; None for the number of ranks, as
            wrappers do. 1.0 for a communication hook that adds gradients up.
        shard_state: each rank keeps momentum and master weights of a part of the rows of each parameter (ZeRO), updates
            these, and gets the others' by an all-gather. For whole parameters on one GPU of each rank, whose gradients
            are the same on all; what one process alone has is not divided.
        check_every: compare a hash of parameters, momenta and factors, with `shard_state` of gradients too, over the
            ranks on every so many steps, and raise a CafinError that names the first that differs; None for never. It
            waits for the device.
        averaging: "parity" (the public implementation's rule), "paper", or an `Averaging`.
        backend: "cuda", "reference", or None to choose by the parameters' device.
        capturable: `step` may be captured in a CUDA graph (see `capture`): counters and scalars then live on the
            device, where a small launch ahead of the update's counts, and `lr` may be a float32 tensor there. For a
            model on one device.
        grad_scaler: the `GradScaler` in use, needed only if the script calls its `unscale_` before `step`: the factors
            must know the scale, which is read where the scaler keeps it.
        error_if_nonfinite: `step` looks at the gradients first, and on a sampled step at the layers' raw moments, and
            raises a `NonFiniteError` if one is inf or NaN. It waits for the device then, so not with `capturable`. May
            be changed between steps.
        momentum_dtype: dtype of new momenta: None for float32 (float64 for float64 parameters), or `torch.bfloat16` or
            `torch.float16` to save memory; a parameter of 16 bits takes float32 or its own.
        master_weights: parameters of 16 bits are rounded copies of float32 weights, `state[p]["master"]`, that are what
            is updated. What a script writes into a parameter counts: where it is not the copy any more, its master
            starts from it.
        stochastic_rounding: parameters of 16 bits are rounded up or down at random, so that the mean of many roundings
            is the number itself; to the nearest otherwise. Not with master weights, which need it not.
        seed: of these random numbers, which depend on it, on the parameter's place and step, and on the element's place
            in memory: the same seed gives the same bits, on a resumed run too.
        param_groups: dicts as for other optimizers: scalars of their own, and "params" that are parameters of the
            model, or names of them, or patterns of names with `*`, `?` and `[...]`. What none of them holds makes a
            last group.
        maximize: ascend instead of descend.
        foreach, fused: accepted, and without effect: every step is fused.
        differentiable: False; steps are not differentiated.
        others: arguments of other optimizers, such as AdamW's `betas`, which are refused with what to do instead.

    Raises:
        CafinError: an argument is refused.
    """

    _decoupled = False
    _precision = Precision()  # of optimizers that were pickled without
    _seed = 0
    _dist: Any = None
    _divide_factor: float | None = None
    _check_every: int | None = None
    _shard_state = False
    _building = False  # torch's constructor is adding the groups
    _every_group: list[dict[str, Any]]  # also while a wrapper steps one after the other
    _loading: Any = None  # the `Checkpoint` that load_state_dict is about to take over
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
        dist: Any = None,
        *,
        averaging: str | Averaging = "parity",
        backend: str | None = None,
        capturable: bool = False,
        grad_scaler: Any = None,
        error_if_nonfinite: bool = False,
        momentum_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        gradient_divide_factor: float | None = None,
        check_every: int | None = None,
        shard_state: bool = False,
        **others: Any,
    ) -> None:
        where = type(self).__name__
        check_model(where, model)
        check_arguments(where, {"foreach": foreach, "fused": fused, "differentiable": differentiable}, others)
        self._precision = Precision.checked(where, momentum_dtype, master_weights, stochastic_rounding, seed)
        self._seed = checked_seed(where, "seed", seed)
        check_momenta(where, model, self._precision)
        capturable = flag(where, "capturable", capturable)
        error_if_nonfinite = flag(where, "error_if_nonfinite", error_if_nonfinite)
        if capturable and error_if_nonfinite:
            refuse(where, "error_if_nonfinite", "be False with capturable=True", True, "a graph cannot wait for it")
        check_scaler(where, grad_scaler)
        requested(backend, where)
        self._dist = check_dist(where, dist, model)
        self._divide_factor = check_divide_factor(where, gradient_divide_factor)
        self._check_every = check_every_of(where, check_every)
        self._shard_state = check_shard_state(where, shard_state, model, dist, capturable, self._precision)
        self.TCov = TCov
        self.averaging = Averaging.named(averaging, gamma)
        self.model = model
        self._steps = 0
        self.capturable = capturable
        self.grad_scaler = grad_scaler
        self.error_if_nonfinite = error_if_nonfinite
        self._requested = backend
        self._reset()
        defaults = Group(lr=lr, beta=beta, Lambda=Lambda, weight_decay=weight_decay, maximize=maximize)
        checked_hyper(self, where, defaults)
        groups = groups_of(where, model, param_groups)
        for number, group in enumerate(groups):
            checked_hyper(self, where, {**defaults, **group}, f"param_groups[{number}]['{{}}']")
        self._find_layers()
        self._building = True
        super().__init__(groups, defaults)
        self._every_group = self.param_groups
        self._building = False
        compare_from_now_on(self)
        check_options(self, where, model.parameters())
        check_team(where, self, self._team, self._modules)
        unowned = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in self._owners]
        warn_without_factors(where, unowned)
        self._attach()

    @leaves_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Let more parameters train, with scalars of their own; "params" as in the argument `param_groups`.

        Layers that have joined the model since the optimizer was made get factors from now on, which start at one;
        those of the others stay as they are. Parameters that no layer of the model owns are updated with F = 1, and a
        warning names them.

        Raises:
            CafinError: the group is refused, or layers have joined between backward and step; nothing has been changed.
        """
        if self._building:
            super().add_param_group(param_group)
        else:
            optimizer = itself(self)
            join(optimizer, param_group, super(AdaFisher, optimizer).add_param_group)
            optimizer._plan = None

    def summary(self) -> Summary:
        """Each parameter with its layer, factors and bytes of state: a table to print, and rows of data."""
        refuse_flat("summary", self)
        return summarise(f"{type(self).__name__} on the {self.backend} backend", parts(self), self.averaging)

    @torch.no_grad()
    def curvature(self) -> Curvature:
        """{parameter name: extremes and mean of F, and how far a step moves it}, as all is now. Waits when first read.

        Of sharded parameters the ranks add up what each holds, so all must call it, and any may read it.

        Raises:
            CafinError: a scalar has been set to what a step would refuse.
        """
        refuse_shared("curvature", self)
        refuse_flat("curvature", self)
        return look(parts(self), self._factors, rates(self, "curvature"), held, over_parts(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and what the backward passes that made them have added to the factors' sums."""
        if torch.compiler.is_compiling():
            _outside(type(self).zero_grad, self, set_to_none)
            return
        try:
            super().zero_grad(set_to_none)
        except (AttributeError, KeyError, TypeError):
            check_groups("zero_grad", self.param_groups)
            raise
        if self._kept_factors is not None:
            self._kept_factors.discard()

    # Step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient, in place, on the current stream.

        Under a `GradScaler` the gradients are unscaled on the way, and a step with non-finite gradients changes
        nothing. On the CUDA backend the kernels read that verdict on the device; the host waits for it where a
        parameter gets its first gradient, on sampled steps of several ranks, and with `error_if_nonfinite` or a model
        on several GPUs. A sampled step that changes nothing is sampled again at the next: the next backward pass asks,
        and waits for that step alone; it asks nothing if all steps are sampled. Without a scaler a gradient that is inf
        or NaN goes into its own elements of momentum and parameter, as in `torch.optim`. A layer whose raw moments hold
        a NaN keeps its factors, and `skipped_refreshes` counts it.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            CafinError: a gradient or scalar is refused; nothing has been changed then. Nor has it after an exception in
                `closure` or a hook ahead of the step, and where memory runs out, the driver refuses a launch, or Ctrl-C
                comes: then `step` may be called again. Two things stay, and are not done twice: factors that were
                refreshed when the update failed, and parameters that were updated before memory ran out on the
                reference backend, or before another GPU of a model on several failed.
            NonFiniteError: see `error_if_nonfinite`; nothing has been changed then.
        """
        if torch.compiler.is_compiling():
            return _outside(type(self).step, self, closure)
        own = type(self).step
        try:
            if own is not AdaFisher.step and getattr(own, "hooked", None) is True:  # torch has wrapped a subclass's
                return self._step(closure)
            if closure is None and not (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or global_pre_hooks
                or global_post_hooks
                or profiling()
            ):
                return self._step()
            return self._watched_step(closure)
        except BaseException:
            forget_scale(self)
            raise

    step.hooked = _SERVED  # type: ignore[attr-defined]  # torch must not wrap it

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            check_callable("step", "closure", closure)
            with torch.enable_grad():
                loss = closure()
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if capturing:
            check_capture(self)
        if self._unsure and self._undecided:
            self._make_sure()
        grad_scale = loss_scale = 1.0
        before = self._plan
        if before is not None and not before.valid(self):
            self._plan = before.of_other_groups(self)
        refuse_scaler(self)
        refuse_by_hand(self)
        verdict = verdict_of_device(self)  # of a plan that holds: a new one may launch on other devices
        if verdict is None:
            self._make_sure()
            scales = unscaling(self)
            if scales is None:
                self._factors.discard()
                return loss
            grad_scale, loss_scale = scales
        sampled = self._may_sample  # and the device may know better
        if sampled or not self._factors.agreed:
            meet(self, sampled)
        hypers = checked_hypers(self, "step")  # before a new plan makes state
        if self.error_if_nonfinite:
            check_finite(self, loss_scale)
        plan = self._plan
        if plan is None:
            if capturing:
                raise BackendError(RUN_FIRST)
            self._plan = plan = Plan(self, before)
        if capturing:
            self._captured.append(plan)  # a replay reads its tables
            plan.expect_capture()
        grads = plan.gradients()
        refresh = self._refresh(hypers, loss_scale, verdict) if sampled else None
        plan.step(self, hypers, grads, grad_scale, refresh, capturing, verdict)
        return loss

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
        return CapturedIteration(itself(self), iteration)

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)  # calls hooks, and tells the profiler

    def _refresh(self, hypers: list[Hyper], loss_scale: float, verdict: Verdict | None) -> Callable[[], None] | None:
        """See `Factors.ready`."""
        unseen = [
            name for name, _, index, layer in self._modules if index not in self._seen and layer.weight.grad is not None
        ]
        moves = any(hyper.lr or isinstance(group["lr"], Tensor) for hyper, group in zip(hypers, self.param_groups))
        if unseen and not self._warned and moves:  # torch.distributed.checkpoint steps with an lr of 0
            self._warned = True
            warn_unseen(type(self).__name__, unseen)
        factors = self._factors
        return factors.ready(loss_scale, verdict) if isinstance(factors, CudaFactors) else factors.ready(loss_scale)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The keys of the public implementation: `state`, `param_groups`, `steps`, `H_D`, `S_D` (in module order). And
        `seed`, with stochastic rounding.

        Names are in it, too: `param_names` in each group, and in the first one `steps` and, by layer, `factors`: the
        same tensors again. So it may be loaded into a model of another order of modules, and
        `torch.distributed.checkpoint` passes it on whole.

        The tensors are the optimizer's own, not copies. Between backward and step it is the state after the last step:
        what the backward pass has added is in it no more than gradients are, and a resumed run repeats the iteration.
        """
        check_groups("state_dict", self.param_groups)
        # The first of the hooks, so that the others see all of it.
        handle = self.register_state_dict_post_hook(with_factors, prepend=True)  # type: ignore[arg-type]
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @leaves_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over a `state_dict` of this class or of the public implementation. The caller's dict is not changed;
        `skipped_refreshes` starts at 0, as the format has no room for it.

        Parameters and layers are found by their names, whatever `DistributedDataParallel` and `torch.compile` have put
        before them. Where the dict has no names, or none that the model has, they are taken in their order.

        Momentum takes the optimizer's `momentum_dtype`; without one, that of a parameter of 16 bits keeps its own dtype
        if that is float32 or the parameter's, and any other the parameter's. Masters that are not there start from
        their parameters; a seed goes on.

        Raises:
            CafinError: it does not fit, and the message names the first key that does not; nothing has been changed
                then.
        """
        optimizer = itself(self)
        take_over(optimizer, state_dict, super(AdaFisher, optimizer).load_state_dict)
        optimizer._reference.over()

    @leaves_inference_mode
    def load_momentum(self, state_dict: Mapping[str, Any]) -> None:
        """Start from the momentum of another optimizer: `exp_avg` and `step` of a state dict of Adam, AdamW or the
        like, for the parameters that it knows. Nothing else is taken over, and factors start as ever.

        Parameters are found by `param_names` where the dict has them; else by their order in equal groups, or in
        `model.parameters()` if the dict has one group.

        Raises:
            CafinError: it does not fit; nothing has been changed then.
        """
        optimizer = itself(self)
        take_momentum(optimizer, state_dict)
        optimizer._plan = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_copied": copied(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        ours = state.pop("_copied", None)
        super().__setstate__(state)
        self.param_groups = self._every_group = [Group(group) for group in self.param_groups]
        self._plan = None
        if self._loading is not None:  # load_state_dict comes by here too, between its hooks
            self._loading.install(self)
        if ours is not None:
            go_on_from(self, ours)


class AdaFisherW(AdaFisher):
    """AdaFisher with decoupled weight decay: `p <- p - lr (m / (1 - beta^t) / F + wd p)`. See `AdaFisher`."""

    _decoupled = True


@torch.compiler.disable
def _outside(call: Callable[..., Any], *args: Any) -> Any:
    """Within a function that is compiled: a step is no part of its graphs."""
    return call(*args)
