"""Each example runs, is short, and says something."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = ["read_row.py", "run_kernel.py", "generate.py"]


@pytest.mark.parametrize("name", SHORT)
def test_runs(name: str) -> None:
    path = EXAMPLES / name
    source = path.read_text()
    assert len(source.splitlines()) <= 40 and "def main(" in source
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path], capture_output=True, text=True, timeout=60, cwd=EXAMPLES.parent,
        env={"PYTHONPATH": str(EXAMPLES.parent), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
