"""Compiles kernels for a Hopper GPU, without one, in a process of their own: the interpreter runs what the compiler may refuse."""

import os
import subprocess
import sys
from pathlib import Path

PRELUDE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, pointers, scalars, constants, warps, aligned=True):
    # pointers: name -> element type; scalars: name -> type; constants: name -> value. aligned: addresses and integers divide by 16
    types = {name: "*" + kind for name, kind in pointers.items()} | scalars | dict.fromkeys(constants, "constexpr")
    at = {name: place for place, name in enumerate(kernel.arg_names)}
    multiples = [*pointers, *(name for name, kind in scalars.items() if kind != "fp32")] if aligned else []
    source = ASTSource(
        kernel, {name: types[name] for name in at}, {(at[name],): value for name, value in constants.items()},
        {(at[name],): [["tt.divisibility", 16]] for name in multiples},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert result.asm["cubin"]
    assert result.metadata.shared <= 227 * 1024, result.metadata.shared
"""


def errors_of(code: str, cache: Path) -> str:
    """What the compiler says of the kernels that code compiles by `compiled`; "" where it takes all of them."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True)
    return done.stderr if done.returncode else ""
