"""A model and its loss, as a function of the user's returns them to `python -m cafin_cupy profile`."""

from __future__ import annotations

import copy
import importlib
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from .errors import CafinError, CafinTypeError, refuse, shown


class Task:
    """What a user's function has returned: `model`, and `loss_of(model)`, which runs the forward pass over a batch.

    Args:
        name: MODULE:FUNCTION. The module is imported as Python imports it, from the present folder first.

    Raises:
        CafinError: the module or function is not there, fails, or returns something else.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        module, colon, attribute = name.partition(":")
        if not module or not colon or not attribute.isidentifier():
            refuse("profile", "MODULE:FUNCTION", "name both, as in train:task", shown(name))
        made = self._call(f"import {module}", lambda: importlib.import_module(module))
        function = getattr(made, attribute, None)
        if not callable(function):
            got = "nothing of that name" if function is None else type(function).__name__
            refuse("profile", name, f"be a function of {made.__file__ or module}", got, kind=CafinTypeError)
        returned = self._call(f"{name}()", function)
        if not isinstance(returned, tuple) or len(returned) != 2:
            refuse("profile", f"{name}()", "return (model, loss_of)", _kind(returned), kind=CafinTypeError)
        self.model, self._loss_of = returned
        if not isinstance(self.model, nn.Module):
            rule = "return a torch.nn.Module first"
            refuse("profile", f"{name}()", rule, type(self.model).__name__, kind=CafinTypeError)
        if not callable(self._loss_of):
            rule = "return a function of the model second"
            refuse("profile", f"{name}()", rule, type(self._loss_of).__name__, kind=CafinTypeError)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            refuse("profile", f"{name}()", "return a model with a parameter that trains", "none")
        self.device = trained[0].device
        self._try()

    def copy(self) -> nn.Module:
        """A model of the same weights."""
        return copy.deepcopy(self.model)

    def loss(self, model: nn.Module) -> Tensor:
        """Forward pass of a copy."""
        result: Tensor = self._loss_of(model)
        return result

    def _try(self) -> None:
        """One iteration without optimizer, of a copy: everything that the function may have got wrong shows here."""
        what = f"loss_of of {self.name}"
        model = self._call(f"a copy of the model of {self.name}", self.copy)
        loss = self._call(what, lambda: self.loss(model))
        if not isinstance(loss, Tensor):
            refuse("profile", what, "return a tensor", _kind(loss), kind=CafinTypeError)
        if loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if loss.numel() != 1 else "one without gradient"
            refuse("profile", what, "return a single number with gradient", got)
        self._call(f"backward from {what}", loss.backward)
        if all(p.grad is None for p in model.parameters()):
            refuse(
                "profile", what, "use the model that it is given", "a loss that knows another one",
                "write `lambda model: ...` and call that model",
            )  # fmt: skip

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except CafinError:
            raise
        except (Exception, SystemExit) as error:  # a script may leave at its end
            _retell(what, error)


def _retell(what: str, error: BaseException) -> NoReturn:
    """The error of a user's code in one sentence, with the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    raise CafinError(
        f"profile: {what} failed with {type(error).__name__}: {text} ({frame.filename}, line {frame.lineno})"
    ) from error


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
