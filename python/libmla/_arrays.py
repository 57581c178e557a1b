"""Arrays, element types, devices and streams of the caller's framework."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from ._module import core, torch, tvm_ffi


class SupportsDLPack(Protocol):
    """An array that other libraries may look into: of PyTorch, NumPy, CuPy, JAX or tvm_ffi."""

    @property
    def shape(self) -> Any: ...
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


A = TypeVar("A", bound=SupportsDLPack)
# Integers for the host: an array, or plain Python numbers.
Ints: TypeAlias = SupportsDLPack | Sequence[int]
# "bf16", "fp16", "fp32", or a dtype of PyTorch, NumPy or ml_dtypes.
DTypeLike: TypeAlias = Any
# "cpu", "cuda", "cuda:1", or a torch.device.
DeviceLike: TypeAlias = Any
# None, a cudaStream_t as an integer, a torch.cuda.Stream, or what has __cuda_stream__.
StreamLike: TypeAlias = Any


def invalid(what: str, where: str, expected: str, got: object) -> ValueError:
    """The library's message of a wrong argument, for what is found out on this side."""
    return ValueError(f"{where}: {what}: expected {expected}, got {got}")


_DTYPES = {"fp32": 0, "float32": 0, "bf16": 1, "bfloat16": 1, "fp16": 2, "float16": 2, "half": 2}
_NAMES = ("fp32", "bf16", "fp16")


def dtype_code(dtype: DTypeLike) -> int:
    """The library's number of an element type."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    code = _DTYPES.get(name.removeprefix("torch."))
    if code is None:
        raise invalid("dtype", "libmla", "fp32, bf16 or fp16", dtype)
    return code


def dtype_name(dtype: DTypeLike) -> str:
    """The library's name of an element type: "fp32", "bf16" or "fp16"."""
    return _NAMES[dtype_code(dtype)]


def device_of(device: DeviceLike) -> tuple[int, int]:
    """Kind (0 the CPU, 1 CUDA) and index of a device."""
    kind, colon, index = str(device).partition(":")
    if kind == "cpu" and index in ("", "0"):
        return 0, 0
    if kind == "cuda" and index.isdecimal():
        return 1, int(index)
    if kind == "cuda" and not colon:
        return 1, torch.cuda.current_device() if torch and torch.cuda.is_available() else 0
    raise invalid("device", "libmla", "cpu, cuda or cuda:INDEX", device)


def device_name(device: tuple[int, int]) -> str:
    """The name of a device: "cpu" or "cuda:INDEX"."""
    return "cpu" if device[0] == 0 else f"cuda:{device[1]}"


def array_device(array: SupportsDLPack) -> tuple[int, int]:
    """Kind and index of the device that an array is on."""
    kind, index = array.__dlpack_device__()
    return (1, index) if int(kind) == 2 else (0, 0)  # 2: kDLCUDA


def stream_handle(device: tuple[int, int], stream: StreamLike) -> int:
    """A stream's handle; where none is named, of the caller's current stream on the device."""
    if device[0] == 0:
        return 0
    if stream is None:
        if torch is not None:
            return torch.cuda.current_stream(device[1]).cuda_stream
        return tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device[1]))
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream
    return stream.__cuda_stream__()[1]


@functools.lru_cache
def _dlpack_dtype(dtype: np.dtype) -> Any:
    if not dtype.isnative:
        raise invalid("dtype", "libmla", "the byte order of this machine", dtype.str)
    return tvm_ffi.dtype(dtype.name)


def argument(array: Any) -> Any:
    """What the module takes for an array. Nothing is copied.

    NumPy's own export through DLPack refuses bfloat16 and read-only arrays, so its arrays are
    handed over by address; the caller keeps them alive during the call.
    """
    if isinstance(array, np.ndarray):
        address = array.__array_interface__["data"][0]
        return core.borrow(address, array.shape, array.strides, _dlpack_dtype(array.dtype))
    return array


def output(array: Any, what: str, where: str) -> Any:
    """The same for an array that is written to."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise invalid(what, where, "an array that may be written to", "a read-only one")
    return argument(array)


def empty_like(array: Any, shape: Sequence[int], where: str, dtype: str | None = None) -> Any:
    """A new array of the framework, device and (where none is named) element type of `array`."""
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(shape, dtype=None if dtype is None else getattr(torch, dtype))
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype if dtype is None else dtype)
    raise invalid("out", where, f"an array, where inputs are of {type(array)}", None)


def host_ints(values: Ints, dtype: type[np.generic] = np.int32) -> Any:
    """Host arrays as they are; a device tensor copied to the host, for which the host waits."""
    if isinstance(values, np.ndarray):
        return argument(values)
    if torch is not None and isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, Sequence):
        return np.fromiter(map(operator.index, values), dtype, len(values))
    return values


def to_torch(tensor: SupportsDLPack) -> Any:
    """A torch.Tensor over the same memory, which it keeps alive."""
    if torch is None:
        raise ImportError("libmla.to_torch: torch is not installed")
    return torch.from_dlpack(tensor)


def to_numpy(tensor: Any) -> np.ndarray:
    """A NumPy array over the same host memory, which it keeps alive; bf16 through ml_dtypes."""
    if str(tensor.dtype) == "bfloat16":
        import ml_dtypes

        return np.from_dlpack(core.as_uint16(tensor)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(tensor)
