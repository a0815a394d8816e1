"""The import rules of the style guide, read off the syntax tree, and the rule that torch computes nothing."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names
SHARED_OPS = {"ops.checks", "ops.bits", "ops.compile", "ops.activation"}
ENGINE_PACKAGES = {"torch", "numpy", "tiktoken", "engine", "ops", "formats"}
EDGES = {"engine/server.py": {"sanic"}, "engine/handlers.py": {"sanic"}, "engine/device.py": {"triton"}}
EDGES |= {"engine/api.py": {"msgspec"}, "engine/messages.py": {"msgspec"}, "engine/openapi.py": {"msgspec"}}
TORCH_FREE = {"engine/requests.py", "engine/scheduler.py", "engine/config.py", "engine/presets.py", "engine/errors.py"}
COMPUTES = set(
    "matmul mm bmm einsum softmax log_softmax sigmoid tanh exp log topk sort argmax multinomial linear silu "  # noqa: SIM905
    "addmm baddbmm scaled_dot_product_attention sum mean cumsum add sub mul div rsqrt sqrt where clamp rand randn "
    "autotune".split()
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return names


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources("formats"), ids=relative)
def test_formats_need_numpy_only(path: Path) -> None:
    foreign = {name for name in imports(path) if name.split(".")[0] not in {*STDLIB, "numpy", "formats"}}
    assert not foreign


@pytest.mark.parametrize("path", sources("ops"), ids=relative)
def test_ops_know_torch_triton_and_their_family(path: Path) -> None:
    family = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for name in imports(path):
        top = name.split(".")[0]
        assert top in STDLIB or top in {"torch", "triton", "ops"}, name
        own = name.rsplit(".", 1)[0] == family and family != "ops"
        assert top != "ops" or name in SHARED_OPS or own, f"{name} is of another family"


@pytest.mark.parametrize("path", sources("engine"), ids=relative)
def test_engine_imports(path: Path) -> None:
    allowed = ENGINE_PACKAGES | EDGES.get(relative(path), set())
    names = {name.split(".")[0] for name in imports(path)} - STDLIB
    assert names <= allowed
    assert relative(path) not in TORCH_FREE or not names & {"torch", "ops"}


@pytest.mark.parametrize("package", ["formats", "ops", "engine"])
def test_nobody_imports_the_edges(package: str) -> None:
    for path in sources(package):
        assert not {name.split(".")[0] for name in imports(path)} & {"cli", "tests", "examples"}, path


def test_cli_imports_inside_commands() -> None:
    body = ast.parse((ROOT / "cli.py").read_text()).body
    top = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in top} <= {*STDLIB, "typer"}


@pytest.mark.parametrize("path", sources("engine") + sources("ops"), ids=relative)
def test_torch_computes_nothing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), f"line {node.lineno}: @"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "torch",
            "F",
            "torch.nn.functional",
            "triton",
        ):
            assert node.attr not in COMPUTES, f"line {node.lineno}: torch.{node.attr}"
