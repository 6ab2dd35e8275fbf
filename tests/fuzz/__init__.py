"""Random calls of the public functions, valid and invalid. Each must end in the right result or in a `CafinError`, not
in a crash, a foreign exception, a silent skip or a changed argument.

`make fuzz` (`python -m fuzz`) starts a process for each *target*: the reference on arrays of NumPy and of PyTorch, the
PyTorch optimizer by the reference, and the kernels on CuPy arrays. Where there is no GPU they run on the emulated one,
as they are and under the sanitizers, and so does the PyTorch optimizer, on tensors of the CPU that are lent to one
device, and to two. A process plays *rounds*. In a round hypothesis plays some sequences of calls on a state machine;
its seed follows from the run's and from the round's number, so that each round can be played again alone, as the report
of a failure says.

A machine holds an optimizer, or some arrays, and what the rule says of them. One of its rules makes a call, after which
either

- the result is that of the rule in float64, within a bound on the rounding errors, and no argument has changed that is
  not documented to, or
- a `CafinError` was raised, and nothing has changed, bit for bit: parameters, gradients, momenta, factors, counters,
  the caller's lists and dicts, and the memory around the arrays.

A call that is known to be valid must not be refused, one that is known to be invalid must be.

What to read first: `calls.attempt`, which makes a call and compares what was before with what is after, and
`functions.py`, the smallest machine. Then

- the other machines: `values.py` (descriptors, `Averaging`, the functions of `reference`), `array_run.py` with
  `optimizer.py` (`AdaFisher` on arrays), `torch_run.py` with `torch_optimizer.py` and `torch_seen.py` (the PyTorch
  optimizer, on the models of `torch_models.py` and in the groups of `torch_groups.py`);
- what they draw: `arrays.py` (arrays of every framework, dtype and memory layout), `layers.py` (layers and their
  batches), `bad.py` (what is no number, no array, no list), `faults.py` and `states.py` (arguments and state dicts that
  must be refused);
- what they expect: `rounded.py` (numbers with a bound on their rounding error), `expected.py` (the rule, written a
  second time with them), `checks.py` (what a step must have made);
- `worker.py`: one process. `__main__.py`: all of them, and the report.

`tests/test_fuzz.py` plants a fault of each kind, which must be found.
"""
