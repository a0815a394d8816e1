"""The model, its state, and what turns text into tokens and back.

``engine`` is installed beside ``ops`` and ``formats`` as top-level packages. ``ops`` is a common name, so another
distribution's package of that name is told apart here, once, before it can fail in a stranger way.
"""

from importlib.util import find_spec
from pathlib import Path


def _refuse_foreign(package: str) -> None:
    here = Path(__file__).resolve().parent.parent
    spec = find_spec(package)
    found = Path(spec.origin).resolve().parent.parent if spec is not None and spec.origin else None
    if found != here:
        raise ImportError(
            f"the package '{package}' that Python finds is in {found}, want rowstream's own in {here}: "
            f"uninstall the other '{package}' or put {here} first on the path"
        )


_refuse_foreign("ops")
_refuse_foreign("formats")
