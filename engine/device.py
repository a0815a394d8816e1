"""Where kernels run. Call before ``ops`` is imported: Triton decides between compiler and interpreter at import."""

import os
import sys
from collections.abc import Callable
from functools import cache

import torch


def open_device() -> torch.device:
    """The NVIDIA card, or the CPU through Triton's interpreter where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    _patch_once_a_launch()
    return torch.device("cpu")


def _patch_once_a_launch() -> None:
    """Spare the interpreter half of its work.

    For the length of a launch it replaces the functions of ``triton.language``, and of its ``core`` where a file
    imports that; it does so again at each call of a device function inside, which changes nothing more (Triton 3.9).
    TODO: drop this when Triton patches once by itself.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(patch, "once"):
        return
    done: set[str] = set()

    class Scope(interpreter._LangPatchScope):
        """Forgets what is patched when the launch that patched it ends."""

        def restore(self) -> None:
            super().restore()
            done.clear()

    @cache
    def languages(module: str) -> frozenset[str]:
        values = sys.modules[module].__dict__.values()
        return frozenset(
            name for name, language in (("tl", tl), ("core", tl.core)) if any(v is language for v in values)
        )

    def patch_once(fn: Callable) -> object:
        missing = languages(fn.__module__) - done
        outermost = not done
        done.update(missing)
        if not missing:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if outermost:
            scope.__class__ = Scope
        return scope

    patch_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
