"""Command line: `python -m cafin_cupy train`, `profile` and `doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, environment
from .errors import CafinError

OPTIMIZERS = ("adafisher", "adafisherw", "adamw", "sgd")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; an option that is not given stays None, so that its default applies."""
    top = argparse.ArgumentParser(
        "python -m cafin_cupy", description="Fused AdaFisher optimizer: try it, and look after it."
    )
    top.add_argument("--version", action="version", version=f"cafin_cupy {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a small residual network on handwritten digits",
        description="Trains a small residual network on scikit-learn's handwritten digits, prints loss and accuracy of "
        "each epoch and draws both. Every learning rate, damping and weight decay has a default for its optimizer.",
    )
    rule = train.add_argument_group("optimizer")
    rule.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adafisher")
    rule.add_argument("--lr", type=float, metavar="X", help="learning rate at the start; falls to 0 along a cosine")
    rule.add_argument(
        "--weight-decay", type=float, metavar="X", help="in the gradient for adafisher and sgd, else decoupled"
    )
    rule.add_argument("--Lambda", type=float, metavar="X", help="damping of the preconditioner (AdaFisher)")
    rule.add_argument("--TCov", type=int, metavar="N", help="every Nth step refreshes the factors (AdaFisher)")
    rule.add_argument(
        "--gamma", type=float, metavar="X", help="decay of the factors' average (AdaFisher), default: 0.8"
    )
    rule.add_argument(
        "--averaging", choices=("parity", "paper"), help="rule of that average (AdaFisher), default: parity"
    )
    run = train.add_argument_group("run")
    run.add_argument(
        "--framework",
        choices=("torch", "jax"),
        help="default: torch. jax: Flax, without the options of a device, a checkpoint, and a picture of factors",
    )
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: auto, the GPU if PyTorch sees one")
    run.add_argument("--backend", choices=("cuda", "reference"), help="of AdaFisher; default: cuda where it can run")
    run.add_argument("--epochs", type=int, metavar="N", help="default: 12")
    run.add_argument("--batch-size", type=int, metavar="N", help="default: 64")
    run.add_argument("--seed", type=int, metavar="N", help="of weights, order and shifts; default: 0")
    run.add_argument("--output", type=Path, metavar="PATH", help="PNG of the curves; default: training.png")
    run.add_argument("--factors", type=Path, metavar="FILE", help="PNG of all factors over the steps (AdaFisher)")
    run.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="save all there after each epoch, and go on from it if it exists",
    )
    run.add_argument("--quiet", action="store_true", help="print the summary alone")

    profile = commands.add_parser(
        "profile",
        help="time a training step of your own with AdaFisher, AdamW and SGD",
        description="Times forward, backward and optimizer of your own model with PyTorch's AdamW and SGD and with "
        "AdaFisher, a few iterations of each in turn, and says what the switch would cost.",
        epilog="FUNCTION takes no argument and returns (model, loss_of). loss_of(model) runs the forward pass over a "
        "batch and returns the loss; it is called with copies of the model, and must use the one that it is given. "
        "Precision, device and torch.compile are as FUNCTION has them. MODULE is imported from the present folder "
        "first, so a script needs `if __name__ == '__main__':` around its own run.",
    )
    profile.add_argument("task", metavar="MODULE:FUNCTION", help="what makes model and loss, as in train:task")
    profile.add_argument("--optimizer", choices=OPTIMIZERS[:2], help="default: adafisher")
    profile.add_argument("--TCov", type=int, metavar="N", help="every Nth step refreshes the factors, default: 100")
    profile.add_argument("--averaging", choices=("parity", "paper"), help="rule of the factors, default: parity")
    profile.add_argument("--steps", type=int, metavar="N", help="iterations to time of each kind, default: 20")

    commands.add_parser(
        "doctor",
        help="say which backend will run here, and why",
        description="Checks everything that training on a GPU needs, and says how to mend what is missing. "
        "Exit code 0 if training will work here, on whichever backend.",
    )
    return top


def _train(options: dict[str, Any]) -> int:
    if options.pop("framework", "torch") == "jax":
        environment.require("train", environment.TRAIN_JAX)
        from . import train_jax

        return train_jax.report(options)
    environment.require("train", environment.TRAIN)
    from . import train

    return train.report(train.Settings(**options))


def _profile(options: dict[str, Any]) -> int:
    environment.require("profile", environment.PROFILE)
    from . import profile

    return profile.report(profile.Settings(**options))


def _doctor(options: dict[str, Any]) -> int:
    from . import doctor

    return doctor.report()


COMMANDS = {"train": _train, "profile": _profile, "doctor": _doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, or 1 after one sentence on standard error (2 for a wrong command line)."""
    options = vars(parser().parse_args(argv))
    command = options.pop("command")
    options = {name: value for name, value in options.items() if value is not None}
    try:
        return COMMANDS[command](options)
    except (CafinError, OSError) as error:
        print(f"cafin_cupy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cafin_cupy: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
