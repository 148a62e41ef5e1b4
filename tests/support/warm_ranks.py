"""Loaded once by the server from which the ranks of tests are forked: what each would spend seconds on."""

# ruff: noqa: F401
import lion_pytorch
import numpy as np
import pytest
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel

import deltawire
import deltawire.publish.sharded.publisher

# Kernels are loaded when they are first called; no threads and no stores, which do not survive a fork.
old = {"w": np.zeros(1000, np.uint16)}
new = {"w": old["w"].copy()}
new["w"][::9] += 1
delta = deltawire.diff(old, new, dtype="BF16", threads=1)
deltawire.apply(delta, old, dtype="BF16", threads=1)
