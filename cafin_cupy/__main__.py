"""Command line: `python -m cafin_cupy train` and `python -m cafin_cupy doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import CafinError

OPTIMIZERS = ("adafisher", "adafisherw", "adamw", "sgd")


def parser() -> argparse.ArgumentParser:
    """The parser of both commands; a training option that is not given stays None, so that its default applies."""
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
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: auto, the GPU if PyTorch sees one")
    run.add_argument("--backend", choices=("cuda", "reference"), help="of AdaFisher; default: cuda where it can run")
    run.add_argument("--epochs", type=int, metavar="N", help="default: 12")
    run.add_argument("--batch-size", type=int, metavar="N", help="default: 64")
    run.add_argument("--seed", type=int, metavar="N", help="of weights, order and shifts; default: 0")
    run.add_argument("--output", type=Path, metavar="PATH", help="PNG of the curves; default: training.png")
    run.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="save all there after each epoch, and go on from it if it exists",
    )
    run.add_argument("--quiet", action="store_true", help="print the summary alone")

    commands.add_parser(
        "doctor",
        help="say which backend will run here, and why",
        description="Checks everything that training on a GPU needs, and says how to mend what is missing. "
        "Exit code 0 if training will work here, on whichever backend.",
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, or 1 after one sentence on standard error (2 for a wrong command line)."""
    options = vars(parser().parse_args(argv))
    command = options.pop("command")
    try:
        if command == "doctor":
            from .doctor import report

            return report()
        from .environment import require_train

        require_train()
        from .train import Settings
        from .train import report as train

        return train(Settings(**{name: value for name, value in options.items() if value is not None}))
    except (CafinError, OSError) as error:
        print(f"cafin_cupy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cafin_cupy: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
