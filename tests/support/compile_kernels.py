"""Compiles kernels for a GPU on a machine without one: launches as JSON from stdin, a line for each that fails.

Triton's interpreter runs more than its compiler takes, so that a kernel that passes the tests may not compile.
"""

import importlib
import json
import sys

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

TARGET = GPUTarget("cuda", 90, 32)


def compile_launch(launch: dict) -> None:
    kernel = getattr(importlib.import_module(launch["module"]), launch["name"])
    names = kernel.arg_names
    constants = {
        name: getattr(tl, value["dtype"]) if isinstance(value, dict) else value
        for name, value in launch["constants"].items()
    }
    signature = {name: "constexpr" if name in constants else launch["types"][name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    compile_for(ASTSource(kernel, signature, places, aligned), target=TARGET, options=launch["options"])


failed = 0
for launch in json.load(sys.stdin):
    try:
        compile_launch(launch)
    except Exception as error:
        failed += 1
        print(f"{launch['module']}.{launch['name']}: {type(error).__name__}: {error}")
sys.exit(failed > 0)
