"""The kernels without a GPU: a C++ compiler takes the CUDA sources as they are, and a stand-in for CuPy launches them,
so that the tests marked `gpu` check them on any machine.

`python -m emulation` (`make emulate`) runs these tests twice: with blocks and their threads in order, and in random
order under sanitizers.

- `cuda.h`: what the kernels use of CUDA C++. What a kernel newly uses is added there.
- `blocks.h`: runs the blocks of a launch, one after another; their threads are fibers that change over where they wait.
- `compiler.py`: CUDA C to functions.
- `device.py`: the stand-in for CuPy and the driver. `plugin.py`: puts it in place for pytest.

What is checked: results; memory that is read before it is written (device and shared memory start as NaN); barriers
and shuffles that some threads never reach; missing barriers (random order); accesses outside an array, past shared
memory or unaligned, and overflow (sanitizers).

What is not: speed; compilation by NVRTC (other tests do that); PTX (`#ifndef EMULATED`); streams and graphs, as a
launch is over when it returns; threads that change over elsewhere than where they wait; fused multiply-adds, so the
last bits differ from a GPU's.
"""
