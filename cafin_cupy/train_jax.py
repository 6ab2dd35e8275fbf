"""`python -m cafin_cupy train --framework jax`: network and task of train.py in Flax, each step one jitted program."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import rule
from .adapters import jax_kernels, jax_linen
from .adapters.jax import fused_adafisher
from .errors import refuse
from .training import DEFAULTS, Epoch, check, draw, images


@dataclass(frozen=True)
class Settings:
    """What to train and how; as those of train.py, of which it has no device, checkpoint and picture of factors.

    Raises:
        CafinError: a value is out of range, the optimizer is not ours, or `output` cannot be a file.
    """

    optimizer: str = "adafisher"
    backend: str | None = None
    epochs: int = 12
    batch_size: int = 64
    lr: float | None = None
    Lambda: float | None = None
    TCov: int | None = None
    gamma: float = rule.DEFAULT_GAMMA
    averaging: str = "parity"
    weight_decay: float | None = None
    seed: int = 0
    output: Path = Path("training.png")
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in ("adafisher", "adafisherw"):
            mend = "leave --framework out"
            refuse("train", "optimizer", "be adafisher or adafisherw with --framework jax", self.optimizer, mend)
        for name, value in DEFAULTS[self.optimizer, self.averaging].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check(self)

    @classmethod
    def of(cls, options: dict[str, Any]) -> Settings:
        """From the options of the command line."""
        for name, value in options.items():
            if name not in cls.__dataclass_fields__:
                refuse("train", name, "be left out with --framework jax", value)
        return cls(**options)


class Network(nn.Module):
    """Images (B, 8, 8, 1) to logits (B, 10); 111,000 parameters."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        def convolution(x: Any, channels: int, stride: int = 1) -> Any:
            x = nn.Conv(channels, (3, 3), strides=stride, padding=1, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        def residual(x: Any) -> Any:
            return nn.relu(x + convolution(nn.relu(convolution(x, x.shape[-1])), x.shape[-1]))

        x = residual(nn.relu(convolution(x, 32)))
        x = residual(nn.relu(convolution(x, 64, 2)))
        return nn.Dense(10)(x.mean((1, 2)))


def shifted(key: Any, x: Any) -> Any:
    """Every image of (B, 8, 8, 1) moved by -1, 0 or 1 pixel along both axes, filled up with its own border."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    starts = jax.random.randint(key, (len(x), 2), 0, 3)
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), x.shape[1:]))(padded, starts)


def train(settings: Settings) -> list[Epoch]:
    """Train as `settings` say; prints one line for each epoch unless quiet. Draws nothing."""
    *pixels, of_train, of_test = images()
    x, x_test = (jnp.asarray(part.reshape(-1, 8, 8, 1), jnp.float32) for part in pixels)
    y, y_test = jnp.asarray(of_train), jnp.asarray(of_test)
    batches = len(x) // settings.batch_size or 1
    size = min(len(x), settings.batch_size)
    key, of_weights = jax.random.split(jax.random.key(settings.seed))
    model = Network()
    # In one program: as they come, each of its operations would be compiled alone.
    variables = jax.jit(partial(model.init, train=True))(of_weights, x[:2])
    params, statistics = variables["params"], variables["batch_stats"]
    layers = jax_linen.find(model, variables, x[:2], train=True, mutable=["batch_stats"])
    optimizer = fused_adafisher(
        optax.cosine_decay_schedule(settings.lr, settings.epochs * batches),
        Lambda=settings.Lambda,
        gamma=settings.gamma,
        TCov=settings.TCov,
        weight_decay=settings.weight_decay,
        decoupled=settings.optimizer == "adafisherw",
        averaging=settings.averaging,
        layers=layers,
        backend=settings.backend,
    )
    state = optimizer.init(params)

    def loss(params: Any, taps: Any, statistics: Any, images: Any, labels: Any) -> Any:
        with jax_linen.tapped(layers, taps):
            logits, new = model.apply(
                {"params": params, "batch_stats": statistics}, images, train=True, mutable=["batch_stats"]
            )
        right = (logits.argmax(1) == labels).sum()
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (new["batch_stats"], right)

    @partial(jax.jit, donate_argnums=(0, 1, 2), static_argnames="sampled")
    def step(params: Any, state: Any, statistics: Any, key: Any, rows: Any, sampled: bool) -> Any:
        batch = layers.zeros(), statistics, shifted(key, x[rows]), y[rows]
        gradient = jax.value_and_grad(loss, argnums=(0, 1) if sampled else 0, has_aux=True)
        (value, (statistics, right)), grads = gradient(params, *batch)
        grads, sums = grads if sampled else (grads, None)
        return *optimizer.step(params, grads, state, factors=sums), statistics, value, right

    @jax.jit
    def accuracy(params: Any, statistics: Any) -> Any:
        logits: Any = model.apply({"params": params, "batch_stats": statistics}, x_test, train=False)
        return (logits.argmax(1) == y_test).mean()

    if not settings.quiet:
        where = "fused kernels" if jax_kernels.wanted(settings.backend) else "plain array code"
        print(f"{settings.optimizer} on {jax.devices()[0].device_kind}, jax {jax.__version__}; {where}")
    epochs: list[Epoch] = []
    order = np.random.default_rng(settings.seed)
    for epoch in range(settings.epochs):
        start = time.perf_counter()
        loss_sum, right_sum = jnp.zeros(()), jnp.zeros((), int)
        for k, rows in enumerate(order.permutation(len(x))[: batches * size].reshape(batches, size)):
            key, now = jax.random.split(key)
            sampled = (epoch * batches + k) % int(settings.TCov or 1) == 0
            params, state, statistics, value, right = step(params, state, statistics, now, rows, sampled=sampled)
            loss_sum, right_sum = loss_sum + value, right_sum + right
        share = float(right_sum) / (batches * size)
        seconds = time.perf_counter() - start
        epochs.append(Epoch(float(loss_sum) / batches, share, float(accuracy(params, statistics)), seconds))
        if not settings.quiet:
            print(epochs[-1].line(epoch + 1))
    return epochs


def report(options: dict[str, Any]) -> int:
    """Train, draw, and print the summary; returns the exit code."""
    settings = Settings.of(options)
    began = time.perf_counter()
    epochs = train(settings)
    draw(settings.output, epochs, f"{settings.optimizer}, jax, seed {settings.seed}")
    seconds = time.perf_counter() - began
    print(f"test accuracy {epochs[-1].test_accuracy:.2%} after {len(epochs)} epochs, {seconds:.1f} s in all")
    print(f"curves in {settings.output}")
    return 0
