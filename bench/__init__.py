"""The benchmark: every contender in one run on one device.  `python -m bench --help` lists what it takes."""
