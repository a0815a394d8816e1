"""Compile kernels for cards that are not here, and read what they take.

Each module of ``ops`` lists its kernels at Kimi K3's shapes in ``compile_specs``. ``python -m ops.compile`` prints
registers, shared memory and stack of them all, or of the modules named after it. Must not run in a process where
Triton interprets.
"""

import pkgutil
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

CARDS = (90, 121)  # compute capabilities: Hopper, GB10


class Spec(NamedTuple):
    """One launch of one kernel."""

    name: str
    kernel: Any
    signature: dict[str, str]  # of the run-time arguments: "*bf16", "i32", "fp32"
    constexprs: dict[str, Any]
    options: dict[str, int]  # num_warps, num_stages


class Compiled(NamedTuple):
    """What one program of a kernel takes."""

    registers: int  # a thread
    shared_bytes: int  # a block
    stack_bytes: int  # a thread; more than 8 means that registers spill
    ptx: str


def compile_for(spec: Spec, capability: int) -> Compiled:
    """Compile ``spec`` for compute capability 90, 121, ...

    Pointers and strides are taken as divisible by 16, as a launch finds them at these shapes.
    """
    names = spec.kernel.arg_names
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    divisible = [["tt.divisibility", 16]]
    attrs = {
        (at,): divisible
        for at, name in enumerate(names)
        if name.startswith("stride") or signature[name].startswith("*")
    }
    source = ASTSource(spec.kernel, signature, {(names.index(k),): v for k, v in spec.constexprs.items()}, attrs)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=spec.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Compiled(found["REG"], compiled.metadata.shared, found["STACK"], compiled.asm["ptx"])


def main() -> None:
    found = pkgutil.walk_packages([str(Path(__file__).parent)], "ops.")
    modules = sys.argv[1:] or [module.name for module in found if not module.ispkg]
    print("card     registers   shared  stack  kernel")
    for module in modules:
        for spec in getattr(import_module(module), "compile_specs", list)():
            for capability in CARDS:
                registers, shared, stack, _ = compile_for(spec, capability)
                print(f"sm_{capability:<5} {registers:9} {shared:8} {stack:6}  {spec.name}")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
