"""Which steps refresh the factors, and what such a step needs: hooks on the layers, and the sums that they fill."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cafin_cupy.arrays import torch_view
from cafin_cupy.backend import choose_for_all
from cafin_cupy.errors import BackendError
from cafin_cupy.factors import Factors, make_factors, owners
from cafin_cupy.interrupts import uninterrupted
from cafin_cupy.layers import Layer
from cafin_cupy.reference import RawSums, raw_sums
from cafin_cupy.rule import Averaging, Hyper, steps_in, whole
from cafin_cupy.update import ReferenceUpdate
from cafin_cupy.verdict import Readback

from .torch_attention import attach_to_attention
from .torch_groups import check_groups
from .torch_inference import leaves_inference_mode
from .torch_internals import at_end_of_backward, backward_number
from .torch_layers import attach, find_layers
from .torch_parallel import Place, Team, settled, team_of
from .torch_plan import Plan
from .torch_ranks import attach_to_root, over_ranks
from .torch_reduced import ReducedFactors
from .torch_shards import is_sharded, local
from .torch_wrappers import itself

_READ_BY_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


class Sampling(torch.optim.Optimizer):
    """What `AdaFisher` is built on: counters, hooks and factors, without the update of parameters."""

    model: nn.Module
    averaging: Averaging
    capturable: bool
    _requested: str | None  # backend
    _steps: int
    _team: Team  # of ranks that compute the model's layers together

    def _reset(self) -> None:
        """Forget all that is derived from parameters, state and device."""
        self._kept_factors: Factors | None = None
        self._plan: Plan | None = None
        self._taps: list[Any] = []
        self._gates: list[Any] = []  # those of them that open and close
        self._compiled = False  # layers of the model have been traced by torch.compile
        weakref.finalize(self, _detach, self._taps)
        self._captured: list[Plan] = []  # what CUDA graphs read
        self._warned = False
        self._flushed_after = -1  # number of the backward pass at whose end the factors' arrays are read
        self._seen: set[int] = set()  # layers that have ever been seen
        self._hypers: dict[Any, Hyper] = {}  # scalars that have been checked
        self._reference = ReferenceUpdate()
        self._skips: Tensor | None = None  # (1,) int64, on the device: steps that a scaler's verdict has prevented
        self._known_skips = 0
        self._unsure: int = 0  # how many steps may not have happened since: each is in `_steps`
        self._readback: Readback | None = None  # brings `_skips` to the host, and
        self._told: Readback | None = None  # has been asked to since the last of these steps

    def _find_layers(self) -> None:
        self._layers, self._modules, self._kinds = find_layers(self.model)
        self._owners = owners(self._layers)
        self._team = team_of(self.model)

    @property
    def _factors(self) -> Factors:
        """The factors, made when first needed, on the device where the model is by then."""
        kept = self._kept_factors
        if kept is None:
            make = leaves_inference_mode(make_factors)
            kept = over_ranks(self, make(self._layers, self.averaging, self.backend, self._devices()))
            itself(self)._kept_factors = kept
        return kept

    def _trained(self) -> list[Tensor]:
        """The parameters that decide on device and backend: those that train, or have."""
        check_groups("step", self.param_groups)
        every = [p for group in self.param_groups for p in group["params"]]
        return [p for p in every if p.requires_grad or p in self.state] or every or list(self.model.parameters())

    def _devices(self) -> set[int | str]:
        return {torch_view(local(p), "step", "model").device for p in self._trained()}

    @property
    def backend(self) -> str:
        """ "cuda" or "reference": what runs for the model; before its first use, what would run where it is now."""
        if self._kept_factors is not None:  # settled: a step that fails later fails, and goes on nowhere else
            return "cuda" if self._kept_factors.kernels else "reference"
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self._trained()}
        return choose_for_all(self._requested, self._devices(), dtypes, type(self).__name__)

    @property
    def steps(self) -> int:
        """Completed steps. Under a `GradScaler` the device alone knows what it has made of the last ones: asking then
        waits for it, behind a sampled step for that step alone."""
        if self._unsure and self._skips is not None:
            optimizer = itself(self)
            skips = int(self._skips) if self._told is None else self._told.wait()
            with uninterrupted():
                optimizer._steps -= skips - self._known_skips
                optimizer._known_skips, optimizer._unsure = skips, 0
                optimizer._discard_unwanted()
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        count = steps_in(type(self).__name__, "steps", value)
        _ = self.steps  # what is still open belongs to the old number
        optimizer = itself(self)
        optimizer._count_steps(count)
        optimizer._discard_unwanted()

    @property
    def TCov(self) -> int:
        """Every how many steps the factors are refreshed."""
        return self._TCov

    @TCov.setter
    def TCov(self, value: int) -> None:
        self = itself(self)
        self._TCov = whole(type(self).__name__, "TCov", value, 1)
        if hasattr(self, "_taps"):
            _ = self.steps
            self._attach()  # the coming step may have become a sampled one, or ceased to be
            self._discard_unwanted()

    @property
    def samples(self) -> bool:
        """True if the next step refreshes the factors. Waits for the device as `steps`, where it depends on that."""
        self._make_sure()
        return self._may_sample

    @property
    def _may_sample(self) -> bool:
        """As `samples`, without waiting: False only where it is certain. Completed steps are `_steps`, or up to
        `_unsure` fewer."""
        if self._steps // self._TCov == (self._steps - self._unsure - 1) // self._TCov:  # none of these is a multiple
            return False
        return self._kept_factors is None or not self._kept_factors.refreshed

    @property
    def _undecided(self) -> bool:
        """True where the host must know more before a backward pass reads the layers: a step that was a sampled one may
        not have happened, and would be repeated. If other steps may not have, the coming one is sampled or not: then
        the layers are read, and the device decides."""
        T, last = self._TCov, self._steps - 1
        return T > 1 and self._unsure > 0 and last // T > (last - self._unsure) // T

    def _make_sure(self) -> None:
        """Let the host know whether the coming step is a sampled one."""
        if self._unsure and self._TCov > 1 and self._may_sample:
            _ = self.steps

    def _reads(self) -> bool:
        """True if a backward pass adds to what the coming step averages; False of a late one through the graph of a
        sampled step that is over. Waits for the device where it must, behind a forward pass: there is work to do."""
        if self._unsure and self._undecided:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    "backward: a CUDA graph must not capture an iteration of which the device alone knows whether it "
                    "is a sampled one; read optimizer.samples before the capture"
                )
            self._make_sure()
        return self._may_sample

    # Hooks and what they bring

    def _attach(self, waiting: bool = False) -> None:
        """Hooks live on sampled steps only; in a compiled model they stay, closed. So they do `waiting` for a model's
        first call after the optimizer was made or loaded, as that may be the one that is compiled. Where a sampled step
        may not have happened they stay for another iteration, open, as a forward pass cannot wait for the answer."""
        sampled = self._may_sample
        wanted = sampled or self._compiled or waiting
        stale = bool(self._gates) and self._gates[0].open is not sampled
        if wanted == bool(self._taps) and not stale:
            return
        with uninterrupted():  # a hook without its handle would stay, and count its layer twice
            if not wanted:
                self._detach()
            elif not self._taps:
                for handle in chain(attach(self), attach_to_attention(self), attach_to_root(self)):
                    self._taps.append(handle)
            for tap in self._gates:
                tap.open = sampled

    def _detach(self) -> None:
        _detach(self._taps)
        self._gates.clear()

    def prepare(self) -> None:
        """Make the factors and compile the kernels now, rather than in autograd's thread."""
        if self._kept_factors is None:
            self._factors  # noqa: B018

    def _receive(
        self,
        index: int,
        h: Tensor,
        s: Tensor,
        layer: Layer | None,
        at_once: bool = False,
        place: Place | None = None,
    ) -> None:
        """From backward: a layer's input and output gradient, to be read `at_once` if their memory is used again. Of a
        layer that several ranks compute together, this rank's share, and its place."""
        if not self._reads():
            return
        h, s = settled(h), settled(s)
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
        if self._team.divides and isinstance(factors, ReducedFactors):
            factors.place(index, place)
        if factors.kernels:
            h, s = h.resolve_neg(), s.resolve_neg()
            h = h if h.dtype in _READ_BY_KERNELS or not h.is_floating_point() else h.float()
            s = s if s.dtype in _READ_BY_KERNELS else s.float()
        home = factors.H[index]
        if (
            not factors.kernels and h.device != home.device and is_sharded(self._layers[index].weight)
        ):  # CPUOffloadPolicy
            if h.numel() and s.numel():
                factors.add(index, beside(raw_sums(layer or self._layers[index], h, s), home))
        elif not at_once and self._defers():
            factors.defer(index, h, s, layer)
        else:
            factors.accumulate(index, h, s, layer)

    def _defers(self) -> bool:
        """Arrange that what waits is read before `backward` returns, and a script may overwrite its input; False where
        that is not possible. Autograd changes no gradient in place that someone holds."""
        number = backward_number()
        if number < 0 or at_end_of_backward is None:  # outside of a backward pass
            return False
        if number != self._flushed_after:
            at_end_of_backward(self._factors.flush)
            self._flushed_after = number
        return True

    # Factors

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{module name: (H, S)}: the moving averages themselves, on the model's device, not copies."""
        factors = self._factors
        return {name: (factors.H[index], factors.S[index]) for name, _, index, _ in self._modules}

    def skipped_refreshes(self) -> dict[str, int]:
        """{module name: how many refreshes of its factors a NaN in its raw moments has prevented}.

        Counted on the device; reading it waits. Copies go on from it, while `load_state_dict` starts again from 0.
        """
        counts = self._factors.skips()
        return {name: counts[index] for name, _, index, _ in self._modules}

    # Counters

    def _discard_unwanted(self) -> None:
        """Forget sums that no step will average."""
        if self._kept_factors is not None and not self._may_sample:
            self._kept_factors.discard()

    def _count_steps(self, steps: int, waiting: bool = False) -> None:
        self._steps = steps
        if self._kept_factors is not None:
            self._kept_factors.refreshed = False
        if self._taps or waiting or not steps % self._TCov:
            self._attach(waiting)


def beside(sums: RawSums, home: Tensor) -> RawSums:
    """Sums where their layer's factors are."""
    return RawSums(sums.H.to(home), sums.S.to(home), sums.n)


def _detach(taps: list[Any]) -> None:
    for handle in taps:
        handle.remove()
    taps.clear()
