"""One thread per process (tiny tensors on few cores), and property tests that are quick and the same every time."""

from __future__ import annotations

import os
import signal

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# A shell makes what it starts with `&` ignore Ctrl-C, and `nohup` SIGHUP; commands that tests start would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("thorough", deadline=None, max_examples=300, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
