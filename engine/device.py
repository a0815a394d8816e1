"""Where kernels run. Call before ``ops`` is imported: Triton decides between compiler and interpreter at import."""

import os
from collections.abc import Callable

import torch


def open_device() -> torch.device:
    """The NVIDIA card, or the CPU through Triton's interpreter where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    _stay_interpreted()
    return torch.device("cpu")


def _stay_interpreted() -> None:
    """Spare the interpreter a third of its work.

    It replaces the functions of ``triton.language`` at each call of a kernel or of a device function, and puts them
    back after it (Triton 3.9). A process that compiles nothing can leave them replaced.
    TODO: drop this when Triton's interpreter no longer does so.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, modules = interpreter._patch_lang, set[str]()

    def patch_once(fn: Callable) -> object:
        if fn.__module__ not in modules:
            modules.add(fn.__module__)
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
