"""The factors over a run: copies of them, and a picture. Drawing needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from . import reference
from .arrays import at
from .errors import BackendError, CafinTypeError, refuse, shown

SHOWN = 6  # layers in a picture, unless they are named
CELLS = 400  # along an axis of an image; more entries or samples than that share a cell, by their mean
DARKEST = 1e-5  # of the largest entry: many are far below it, and the smallest ones are 0

Array = np.ndarray[Any, Any]


class History(NamedTuple):
    """The factors of one layer as they entered F.

    Attributes:
        steps: numbers of the steps that refreshed them, from 0: (samples,).
        H: (samples, H_size); `S`: (samples, S_size); float64.
    """

    steps: Array
    H: Array
    S: Array


class Recorder:
    """Copies the factors whenever a step has refreshed them.

        recorder = Recorder(optimizer)
        for batch in batches:
            ...
            optimizer.step()
            recorder.record()
        recorder.draw("factors.png")

    The copies stay on the device, as large as the factors for each sampled step; nothing waits before they are read.

    Args:
        optimizer: an AdaFisher, of PyTorch or of raw arrays.
        layers: names of the layers to watch, as in `optimizer.factors()`; all without.

    Raises:
        CafinError: a layer is not the optimizer's.
    """

    def __init__(self, optimizer: Any, layers: Sequence[str] | None = None) -> None:
        if not hasattr(optimizer, "factors"):
            refuse("Recorder", "optimizer", "be an AdaFisher", type(optimizer).__name__, kind=CafinTypeError)
        self._optimizer = optimizer
        names = list(optimizer.factors())
        _check_names("Recorder", names if layers is None else layers, names)
        self.layers = names if layers is None else list(layers)
        self.steps: list[int] = []
        self._copies: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self.layers}

    def record(self) -> bool:
        """Copy the factors, if the last step has refreshed them and they are not copied yet; True if so."""
        step = self._optimizer.steps - 1
        if step < 0 or step % self._optimizer.TCov or (self.steps and self.steps[-1] == step):
            return False
        factors = self._optimizer.factors()
        for name, copies in self._copies.items():
            H, S = factors[name]
            with at(H):
                copies.append((_copy(H), _copy(S)))
        self.steps.append(step)
        return True

    def history(self, layer: str) -> History:
        """What has been recorded of a layer. Waits for the device.

        Raises:
            CafinError: the layer is not watched.
        """
        _check_names("history", [layer], self._copies)
        H, S = ([pair[k] for pair in self._copies[layer]] for k in (0, 1))
        return History(np.asarray(self.steps, np.int64), self._entered(H), self._entered(S))

    def _entered(self, copies: list[Any]) -> Array:
        """(samples, entries): the averages in the form that F is made of."""
        if not copies:
            return np.zeros((0, 0))
        with at(copies[0]):
            rows = _host(array_namespace(copies[0]).stack(copies)).astype(np.float64)
        return np.stack([reference.effective(row, self._optimizer.averaging) for row in rows])

    def draw(self, path: str | Path, layers: Sequence[str] | None = None, title: str = "") -> None:
        """Write a picture of H and S over the steps: a column for each layer, one scale of colours for all.

        Args:
            path: of the file, whose suffix says its format (png without one).
            layers: which; without, the six that have the most entries.
            title: above all.

        Raises:
            CafinError: nothing has been recorded, a layer is not watched, or matplotlib is missing.
        """
        if not isinstance(path, (str, os.PathLike)):
            refuse("draw", "path", "be the name of a file", shown(path), kind=CafinTypeError)
        if not isinstance(title, str):
            refuse("draw", "title", "be a string", shown(title), kind=CafinTypeError)
        sizes = {name: [F.shape[0] for F in pair] for name, pair in self._optimizer.factors().items()}
        if layers is None:
            largest = sorted(self.layers, key=lambda name: -sum(sizes[name]))[:SHOWN]
            layers = [name for name in self.layers if name in largest]
        _check_names("draw", layers, self._copies)
        layers = [name for name in layers if all(sizes[name])]
        if not self.steps or not layers:
            refuse("draw", "recorder", "have seen a sampled step of a layer", "none", "call record() after step()")
        if find_spec("matplotlib") is None:
            raise BackendError("draw: needs matplotlib; install with: pip install matplotlib")
        _draw({name: self.history(name) for name in layers}, Path(path), title)


def _check_names(where: str, given: Sequence[str], known: Any) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        refuse(where, "layers", "be a list of names", shown(given), kind=CafinTypeError)
    for name in given:
        if not isinstance(name, str) or name not in known:
            refuse(where, "layers", f"be among {list(known)}", shown(name))


def _copy(array: Any) -> Any:
    return array_namespace(array).asarray(array, copy=True)


def _host(array: Any) -> Array:
    """A NumPy array of the same values."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    return np.asarray(array.get() if hasattr(array, "get") else array)


def _cells(x: Array, edges: Array) -> tuple[Array, Array]:
    """(means over axis 0 of blocks of neighbours, edges of the blocks), with at most about CELLS of them."""
    starts = np.arange(0, len(x), -(-len(x) // CELLS))
    sizes = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts, axis=0) / sizes[:, None], np.append(edges[starts], edges[-1])


def _edges(steps: Array) -> Array:
    """A sample reaches from its step to the next; the last one as far as the one before."""
    last = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return np.append(steps, steps[-1] + last)


def _draw(histories: dict[str, History], path: Path, title: str) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # not pyplot, which would look for a display
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(1.2 + 1.75 * len(histories), 5.0), layout=ConstrainedLayoutEngine(w_pad=0.08))
    panels = figure.subplots(2, len(histories), squeeze=False, sharex=True)
    top = max(float(np.nanmax(F)) for history in histories.values() for F in (history.H, history.S))
    top = top if 0.0 < top < np.inf else 1.0
    for number, (name, history) in enumerate(histories.items()):
        for row, (letter, of, F) in enumerate((("H", "input", history.H), ("S", "output gradient", history.S))):
            samples, steps = _cells(F, _edges(history.steps))
            cells, entries = _cells(samples.T, np.arange(F.shape[1] + 1))
            axes = panels[row, number]
            shown = np.maximum(cells, DARKEST * top)
            norm = LogNorm(DARKEST * top, top)
            image = axes.pcolormesh(steps, entries, shown, norm=norm, cmap="magma", rasterized=True)
            axes.invert_yaxis()
            axes.locator_params(axis="both", nbins=4, integer=True)
            axes.tick_params(labelsize=8)
            axes.set_title(f"{name}: {letter} ({F.shape[1]})", fontsize=9)
            if number == 0:
                axes.set_ylabel(f"{letter}: entry ({of})", fontsize=9)
            if row == 1:
                axes.set_xlabel("step", fontsize=9)
    bar = figure.colorbar(image, ax=panels, aspect=40, pad=0.01, extend="min")
    bar.set_label("value in F = outer(S, H) + Λ", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
