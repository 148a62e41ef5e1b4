"""What sglang_gpu.py asks of an SGLang server, as one more `--custom-weight-loader`: checksums."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from measure import sha256


def checksums(model: Any, named_tensors: Any) -> None:
    """Write the SHA-256 of every parameter, read from memory without deltawire's code, to the file that is named."""
    ((_, path),) = named_tensors
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    named = dict(model.named_parameters())
    with ThreadPoolExecutor(12) as pool:
        found = dict(zip(named, pool.map(sha256, named.values()), strict=True))
    Path(bytes(path.tolist()).decode()).write_text(json.dumps(found))
