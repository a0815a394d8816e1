"""Every kernel compiles for Hopper and for GB10 without a card, inside their shared memory, without spills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SHARED = {"sm_90": 232_448, "sm_121": 101_376}  # bytes a block
STACK = 8  # bytes a thread; a spill takes more


def modules(pattern: str) -> set[str]:
    """Modules of ops whose source matches."""
    files = [path for path in (ROOT / "ops").rglob("*.py") if re.search(pattern, path.read_text())]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}


def test_every_module_that_launches_lists_its_kernels() -> None:
    assert modules(r"def \w+_kernel\(") == modules(r"def compile_specs\(")


@pytest.mark.parametrize("module", sorted(modules(r"def compile_specs\(")))
def test_compiles(module: str, tmp_path: Path) -> None:
    """In a process of its own: where Triton interprets it does not compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "ops.compile", module]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert {line[0] for line in lines} == set(SHARED)
    for card, _, shared, stack, kernel in lines:
        assert int(shared) <= SHARED[card], f"{kernel} for {card} takes {shared} bytes of shared memory"
        assert int(stack) <= STACK, f"{kernel} for {card} spills: {stack} bytes of stack"
