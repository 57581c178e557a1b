"""Loads the compiled module and apache-tvm-ffi, through which it is called."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_DISABLE = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


def _import_tvm_ffi() -> Any:
    """Imports tvm_ffi so that it compiles nothing.

    For a PyTorch without a C interface of DLPack (before 2.10) it would build one at import unless
    told otherwise; tensors then go through the Python protocol, which takes some microseconds more.
    """
    prebuilt = importlib.util.find_spec("torch_c_dlpack_ext") is not None
    if "tvm_ffi" in sys.modules or prebuilt or _DISABLE in os.environ:
        import tvm_ffi

        return tvm_ffi
    os.environ[_DISABLE] = "1"
    try:
        import tvm_ffi
    finally:
        del os.environ[_DISABLE]
    return tvm_ffi


tvm_ffi: Any = _import_tvm_ffi()
core: Any = tvm_ffi.load_module(str(Path(__file__).parent / "_core.so"))

# tvm_ffi has imported PyTorch where it is installed.
torch: Any = sys.modules.get("torch")


class Handle:
    """Holds an object of the module, of which there is one: it is not copied, nor pickled."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: copy, pickle: expected an object of its own, made by the"
            " constructor, got one that holds memory and plans"
        )
