"""What the adapter takes from PyTorch beyond its documented interface, and what serves where a release lacks it.

All of it is here but for `arrays.torch_stream` and `unchanged.Unchanged` of the core, and what `torch.overrides` tells
subclasses of tensors to use. PyTorch 2.6 and 2.13 have all names, but for the ones that say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks as global_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as global_pre_hooks
except ImportError:  # then every step looks for hooks, as torch does
    global_pre_hooks = global_post_hooks = {0: None}  # type: ignore[assignment,dict-item]


def _found(owner: Any, name: str, substitute: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(owner, name, substitute)  # type: ignore[no-any-return]


# True while the profiler runs; without it every step tells it.
profiling = _found(torch.autograd, "_profiler_enabled", lambda: True)

# Calls a function when the running backward pass is over, and that pass's number, -1 outside; without one of them
# inputs and output gradients are read as they come, which takes more launches.
at_end_of_backward: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None
)
backward_number = _found(torch._C, "_current_graph_task_id", lambda: -1)

# True if the running backward pass retains its graph, so that another may follow; without it inputs are held as long as
# the script holds its loss.
graph_is_kept = _found(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

# The hooks for saved tensors in force (checkpointing, offloading), or None; without it (2.6) every input is handed to
# autograd as if there were some.
top_saved_tensors_hooks = _found(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: ())

# True within transforms of functions, and of gradients that are many at once; without them their tensors are refused.
transforming = _found(torch._C, "_are_functorch_transforms_active", lambda: False)
is_batched = _found(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", lambda s: False)


def scale_of(scaler: Any) -> Any:
    """The tensor in which a `GradScaler` has its scale; None without it, as of a disabled one, and the host asks
    `get_scale`, which waits."""
    tell = getattr(scaler, "_get_scale_async", None)
    return None if tell is None or not scaler.is_enabled() else tell()


# True while a model is exported, which is no training (documented since 2.7).
exporting = _found(torch.compiler, "is_exporting", lambda: False)

# Counts a change in place of each tensor, so that a graph that saved old values notices; the documented function takes
# a frame of Python more.
count_changes = _found(torch._C, "_increment_version", torch.autograd.graph.increment_version)


def calling_frame() -> str:
    """The name of the function at which Dynamo has begun the graph that it traces."""
    stack = torch._guards.TracingContext.extract_stack()
    return stack[0].name if stack else ""
