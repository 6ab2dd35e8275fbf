"""`AdaFisher` on raw arrays: owns momentum, factors and counters, for training loops of any framework's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .arrays import View, beside, current_stream, known, view
from .backend import choose
from .curvature import Curvature, look
from .errors import CafinError, CafinTypeError, refuse, shown
from .factors import make_factors, owners
from .interrupts import uninterrupted
from .layers import Layer
from .memory import moved, refuse_overlap
from .nonfinite import raw_moments, refuse_nonfinite
from .parts import parts, rates
from .precision import Precision, checked_seed, sort_of, zeros_like
from .rounding import Noise, step_noise, widened
from .rule import DEFAULT_GAMMA, Averaging, Hyper, at_least, flag, whole
from .state import take_over
from .streams import joined
from .summary import Summary, summarise
from .trees import leaves, structure
from .update import (
    CudaUpdate,
    ReferenceUpdate,
    layout,
    like_params,
    matching,
    named_views,
    outside_inference_mode,
    same_order,
    scalars,
    writable,
)


class AdaFisher:
    """AdaFisher for arrays that are updated in place: NumPy, CuPy, PyTorch, or anything that speaks DLPack.

        opt = AdaFisher([w1, b1, w2, b2], layers=[fc1 := Linear(w1, b1), fc2 := Linear(w2, b2)])
        ...
        if opt.samples:
            opt.accumulate(fc1, h1, s1)
            opt.accumulate(fc2, h2, s2)
        opt.step(grads)

    Parameters are matched to layers by identity; parameters of no layer get F = 1. On the CUDA backend `step` is one
    launch on the current stream, three on a sampled step.

    Args:
        params: arrays, or nested lists, tuples and mappings of arrays, on one device; on the CUDA backend each is
            float32, bfloat16 or float16, contiguous or channels_last.
        layers: descriptors holding some of the same arrays.
        lr: learning rate, >= 0. May be changed between steps, as may the other scalars.
        beta: decay of the momentum, in [0, 1).
        Lambda: damping, > 0.
        gamma: decay of the factors, in [0, 1]; its meaning depends on `averaging`.
        TCov: a step is sampled if the number of completed steps is a multiple of it.
        weight_decay: >= 0.
        decoupled: False for AdaFisher, True for AdaFisherW.
        averaging: "parity", "paper" or an `Averaging`.
        backend: "cuda", "reference", or None to choose.
        error_if_nonfinite: `step` looks at the gradients first, and on a sampled step at the layers' raw moments, and
            raises a `NonFiniteError` if one is inf or NaN. It waits for the device then. May be changed between steps.
        momentum_dtype: of the momenta: None for float32 (float64 for float64 parameters), or "bfloat16", "float16" to
            save memory; a parameter of 16 bits takes float32 or its own.
        master_weights: parameters of 16 bits are rounded copies of float32 weights that the optimizer keeps and
            updates. What the script writes into a parameter counts: where it is not the copy any more, its master
            follows it.
        stochastic_rounding: parameters of 16 bits are rounded up or down at random, so that the mean of many roundings
            is the number itself; to the nearest otherwise. Without masters.
        seed: of these random numbers; one seed gives the same bits on every run, and on a resumed one.

    Attributes:
        steps: completed steps.
        momenta: one array per parameter, in order.
        masters: one array per parameter, in order; None for those without.
        backend: "cuda" or "reference".

    Raises:
        CafinError: an argument is refused.
    """

    def __init__(
        self,
        params: Any,
        layers: Sequence[Layer] = (),
        *,
        lr: float = 1e-3,
        beta: float = 0.9,
        Lambda: float = 1e-3,
        gamma: float = DEFAULT_GAMMA,
        TCov: int = 100,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        averaging: str | Averaging = "parity",
        backend: str | None = None,
        error_if_nonfinite: bool = False,
        momentum_dtype: Any = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        where = "AdaFisher"
        self._precision = Precision.checked(where, momentum_dtype, master_weights, stochastic_rounding, seed)
        self._seed = checked_seed(where, "seed", seed)
        self.error_if_nonfinite = flag(where, "error_if_nonfinite", error_if_nonfinite)
        self.lr, self.beta, self.Lambda, self.weight_decay, self.decoupled = lr, beta, Lambda, weight_decay, decoupled
        self._hyper(where)
        self.TCov = TCov
        self.averaging = Averaging.named(averaging, gamma)
        self._asked = backend
        self._named = list(leaves(params, "params", where))
        self._params = structure(params)
        if not self._named:
            refuse(where, "params", "hold at least one array", shown(params))
        self._p = [view(array, where, name) for name, array in self._named]
        for (name, _), v in zip(self._named, self._p):
            writable(where, name, v)
            if v.device != self._p[0].device or sort_of(v.dtype) != sort_of(self._p[0].dtype):
                rule = f"be {sort_of(self._p[0].dtype)} on {self._p[0].device} as the first parameter"
                refuse(where, name, rule, f"{v.dtype} on {v.device}", "use one optimizer for each")
        refuse_overlap(where, [(name, v) for (name, _), v in zip(self._named, self._p)])
        self._layers = self._checked_layers(layers)
        self.backend = choose(backend, self._p[0].device, {v.dtype for v in self._p}, where)
        self._arrays = [known(array, where, name) for name, array in self._named]
        self.momenta = [
            zeros_like(where, array, self._precision.momentum_of(where, name, v.dtype))
            for (name, _), v, array in zip(self._named, self._p, self._arrays)
        ]
        self.masters = [
            widened(array) if self._precision.has_master(v.dtype) else None for v, array in zip(self._p, self._arrays)
        ]
        self._m = [view(m) for m in self.momenta]
        self._w = [None if w is None else view(w) for w in self.masters]
        self._written = [(name, v) for (name, _), v in zip(self._named, self._p)]
        self._written += named_views("momenta", self._m) + named_views("masters", self._w)
        self._factors = make_factors(self._layers, self.averaging, self.backend, {self._p[0].device})
        self._places = {id(layer): index for index, layer in enumerate(self._layers)}
        belongs = owners(self._layers)
        self._owners = [belongs.get(id(array)) for _, array in self._named]
        self._pairs = list(map(self._pair, self._owners))
        self._launch = self._launcher(where) if self.backend == "cuda" else None
        self._reference = ReferenceUpdate()
        self.steps = 0

    def _checked_layers(self, layers: Sequence[Layer]) -> list[Layer]:
        if not isinstance(layers, (list, tuple)):
            refuse("AdaFisher", "layers", "be a list of layer descriptors", type(layers).__name__, kind=CafinTypeError)
        known_arrays = {id(array) for _, array in self._named}
        names: set[str] = set()
        listed: set[int] = set()
        for index, layer in enumerate(layers):
            if id(layer) in listed:
                refuse("AdaFisher", f"layers[{index}]", "be listed once", "the same descriptor again")
            listed.add(id(layer))
            if not isinstance(layer, Layer):
                refuse(
                    "AdaFisher", f"layers[{index}]", "be a layer descriptor", type(layer).__name__, kind=CafinTypeError
                )
            if not {id(layer.weight), id(layer.bias)} & known_arrays:
                mend = "pass the same array objects in both"
                refuse("AdaFisher", f"layers[{index}]", "hold an array of `params`", layer.label, mend)
            name = layer.name or str(index)
            if name in names:
                refuse("AdaFisher", f"layers[{index}].name", "be used once", shown(name))
            names.add(name)
        return list(layers)

    def _pair(self, place: tuple[int, str] | None) -> tuple[Any, Any] | None:
        if place is None:
            return None
        index, role = place
        return self._factors.of_weight(index) if role == "weight" else self._factors.of_bias(index)

    def _launcher(self, where: str) -> CudaUpdate:
        pairs = [pair and (view(pair[0]), view(pair[1])) for pair in self._pairs]
        layouts = [
            layout(where, n, v, pair[0].size if pair else 0, m.dtype)
            for (n, _), v, pair, m in zip(self._named, self._p, pairs, self._m)
        ]
        same_order(where, self._p, "momenta", self._m)
        same_order(where, self._p, "masters", self._w)
        pointers = [(pair[0].ptr, pair[1].ptr) if pair else (0, 0) for pair in pairs]
        masters = [v.ptr if v else 0 for v in self._w] if any(self._w) else []
        return CudaUpdate(layouts, pointers, self._arrays[0], int(self._p[0].device), masters)

    def _hyper(self, where: str) -> Hyper:
        return Hyper.checked(where, self.lr, self.beta, self.Lambda, self.weight_decay, self.decoupled)

    @property
    def TCov(self) -> int:
        """Every how many steps the factors are refreshed."""
        return self._TCov

    @TCov.setter
    def TCov(self, value: int) -> None:
        self._TCov = whole("AdaFisher", "TCov", value, 1)
        if hasattr(self, "steps") and not self.samples:
            self._factors.discard()  # the coming step is no sampled one any more

    @property
    def samples(self) -> bool:
        """True if the next step refreshes the factors, and so wants `accumulate` for every layer before it."""
        return self.steps % self.TCov == 0 and not self._factors.refreshed

    def accumulate(self, layer: Layer, h: Any, s: Any) -> None:
        """Add one forward/backward pair of a layer to the sums of the coming sampled step.

        May be called several times a step: micro-batches and repeated calls of a layer add up. Outside sampled steps it
        does nothing.

        Args:
            layer: one of the optimizer's descriptors.
            h: the layer's input; `s`: gradient of the loss with respect to its output; shapes: see the descriptor.

        Raises:
            CafinError: `layer` is not the optimizer's, or an array does not fit it. After any error the call has added
                nothing.
        """
        index = self._places.get(id(layer))
        if index is None:
            label = layer.label if isinstance(layer, Layer) else shown(layer)
            refuse("accumulate", "layer", "be one of the optimizer's layers", label, "list it in `layers=`")
        if self.samples:
            self._factors.accumulate(index, h, s)

    def discard(self) -> None:
        """Forget what `accumulate` has added, as for a batch that is skipped."""
        self._factors.discard()

    def step(self, grads: Any, *, grad_scale: float = 1.0) -> None:
        """Update parameters and momenta in place, and the factors first if the step is sampled.

        A gradient that is inf or NaN goes into its own elements of momentum and parameter, and stays there. A layer
        whose raw moments hold a NaN keeps its factors, and `skipped_refreshes` counts it.

        Args:
            grads: gradients in the structure of `params`, one for each; strided ones are copied.
            grad_scale: factor that the loss was multiplied by; divided out of gradients and factors.

        Raises:
            CafinError: an argument is refused; nothing has been changed then. Nor has it where memory runs out, or the
                driver refuses a launch, or Ctrl-C comes: then the step may be tried again. Two things stay, and are not
                done twice: factors that were refreshed when the update failed, and on the reference backend the
                parameters that were updated before memory ran out.
            NonFiniteError: see `error_if_nonfinite`; nothing has been changed then, and what `accumulate` has added is
                still there.
        """
        where = "step"
        hyper = self._hyper(where)
        scale = at_least(where, "grad_scale", grad_scale, 0.0, strict=True)
        self._check_places(where)
        g = like_params(where, self._p, self._params, grads, "grads")
        refuse_overlap(where, self._written, named_views("grads", g))
        t = self.steps + 1
        # All that may fail comes first. Then the factors are written, which the update reads, and at once the update.
        if self._launch is None:
            near = [beside(v.owner, p, where, "grads") for v, p in zip(g, self._arrays)]
            self._check_finite(where, g, scale)
            refresh = self._ready(scale)
            with uninterrupted():
                if refresh is not None:
                    refresh()
                number = step_noise(self._precision.begin, t)
                every = zip(self._arrays, near, self.momenta, self._pairs, self.masters)
                for key, (p, grad, m, pair, w) in enumerate(every):
                    noise = Noise(number, key) if number else None
                    self._reference(key, p, grad, m, pair, hyper, t, scale, w, noise)
                self._count(t)
        else:
            device = int(self._p[0].device)
            stream = current_stream(self._p[0].owner, device)
            with joined([v.owner for v in (*self._p, *g)], device, stream):
                held = [matching(a, b) for a, b in zip(g, self._p)]
                self._check_finite(where, g, scale)
                refresh = self._ready(scale)
                sets, which = [scalars(hyper, t, scale, self._precision.begin)], [0] * len(held)
                at = [[v.ptr for v in views] for views in (self._p, held, self._m)]
                self._launch(at[0], at[1], at[2], sets, which, stream, refresh, partial(self._count, t))

    def _count(self, steps: int) -> None:
        self.steps = steps
        self._factors.refreshed = False
        self._reference.over()

    def _check_finite(self, where: str, grads: Sequence[View], grad_scale: float) -> None:
        if self.error_if_nonfinite:
            found = [(f"gradient of {name}", v.owner) for (name, _), v in zip(self._named, grads)]
            found += raw_moments(self._factors, grad_scale) if self.samples else []
            refuse_nonfinite(where, found, "call discard() and leave the batch out")

    def _ready(self, grad_scale: float) -> Callable[[], None] | None:
        """See `Factors.ready`."""
        return self._factors.ready(grad_scale) if self.samples else None

    def _check_places(self, where: str) -> None:
        """Refuse parameters and momenta that are no longer where the optimizer has found them."""
        for (name, array), v in zip(self._named, self._p):
            if moved(array, v):
                rule, mend = "keep its memory, shape and type", "write into it in place, or make a new optimizer"
                refuse(where, name, rule, "others since construction", mend)
        outside_inference_mode(where, "momenta", self.momenta[0])  # the others were made with it
        for path, arrays, views in (("momenta", self.momenta, self._m), ("masters", self.masters, self._w)):
            for index, (array, kept) in enumerate(zip(arrays, views)):
                if kept is not None and (array is not kept.owner or moved(array, kept)):
                    mend = "write into it in place, or use load_state_dict"
                    refuse(where, f"{path}[{index}]", "stay the array that it was", "another one", mend)

    def factors(self) -> dict[str, tuple[Any, Any]]:
        """{layer name (its place where it has none): (H, S)}: the moving averages themselves, not copies."""
        names = (layer.name or str(index) for index, layer in enumerate(self._layers))
        return dict(zip(names, zip(self._factors.H, self._factors.S)))

    def skipped_refreshes(self) -> dict[str, int]:
        """{layer name, as in `factors`: how many refreshes of its factors a NaN in its raw moments has prevented}.

        Counted on the device; reading it waits. Copies go on from it, while `load_state_dict` starts again from 0.
        """
        return dict(zip(self.factors(), self._factors.skips()))

    def summary(self) -> Summary:
        """Each parameter with its layer, factors and bytes of state: a table to print, and rows of data."""
        return summarise(f"AdaFisher on the {self.backend} backend", parts(self), self.averaging)

    def curvature(self) -> Curvature:
        """{parameter name: extremes and mean of F, and how far a step moves it}, as all is now. Waits when first read.

        Raises:
            CafinError: a scalar has been set to what a step would refuse.
        """
        return look(parts(self), self._factors, rates(self, "curvature"))

    def state_dict(self) -> dict[str, Any]:
        """`steps`, `momenta`, and `H`, `S` in the order of `layers`: the arrays themselves, not copies. With master
        weights also `masters`, with stochastic rounding `seed`."""
        state = {
            "steps": self.steps,
            "momenta": list(self.momenta),
            "H": list(self._factors.H),
            "S": list(self._factors.S),
        }
        if self._precision.masters:
            state["masters"] = list(self.masters)
        if self._precision.begin:
            state["seed"] = self._seed
        return state

    def __getstate__(self) -> dict[str, Any]:
        if self._factors.pending:
            raise CafinError(
                "AdaFisher: a copy must be made between steps, got sums that wait for one; "
                "call step() or discard() first"
            )
        names = ("lr", "beta", "Lambda", "TCov", "weight_decay", "decoupled", "averaging", "error_if_nonfinite")
        options = {name: getattr(self, name) for name in names}
        options["momentum_dtype"], options["master_weights"] = self._precision.momentum, self._precision.masters
        options["stochastic_rounding"], options["seed"] = self._precision.begin > 0, self._seed
        return {
            "params": self._params,
            "layers": self._layers,
            "options": {**options, "backend": self._asked},
            "state": self.state_dict(),
            "skipped": self._factors.skipped,
        }

    def __setstate__(self, copied: dict[str, Any]) -> None:
        self.__init__(copied["params"], copied["layers"], **copied["options"])  # type: ignore[misc]
        self.load_state_dict(copied["state"])
        self._factors.count_from(copied["skipped"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a `state_dict` into this optimizer's arrays, whose dtypes stay. `state` is not changed;
        `skipped_refreshes` starts at 0. Masters that it lacks start from the parameters, and a seed goes on.

        Raises:
            CafinError: it does not fit, and the message names the first key that does not; nothing has been changed
                then.
        """
        take_over(self, state)
