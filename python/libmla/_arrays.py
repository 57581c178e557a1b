"""Arrays, element types, devices and streams of the caller's framework."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from ._checks import integer, invalid, shown
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
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    raise invalid("stream", "libmla", "None, a handle or a CUDA stream", shown(stream))


# What NumPy exports itself, three times as fast.
_EXPORTED = {np.dtype(name) for name in ("f2", "f4", "i4", "i8")}


@functools.lru_cache
def _dlpack_dtype(dtype: np.dtype) -> Any:
    if not dtype.isnative:
        raise invalid("dtype", "libmla", "the byte order of this machine", dtype.str)
    try:
        return tvm_ffi.dtype(dtype.name)
    except ValueError:
        raise invalid("dtype", "libmla", "fp32, bf16, fp16, int32 or int64", dtype) from None


def argument(array: Any, what: str, where: str) -> Any:
    """What the module takes for an array. Nothing is copied.

    NumPy's own export through DLPack refuses bfloat16 and read-only arrays: those are handed over
    by address, and the caller keeps them alive during the call.
    """
    if torch is not None and isinstance(array, torch.Tensor):
        check_tensor(array, what, where)
        return array
    if isinstance(array, np.ndarray):
        if array.dtype in _EXPORTED and array.flags.writeable:
            try:
                return tvm_ffi.from_dlpack(array)
            except BufferError:  # strides that are no whole elements, which borrow names
                pass
        address = array.__array_interface__["data"][0]
        return core.borrow(address, array.shape, array.strides, _dlpack_dtype(array.dtype))
    return _exporting(array, what, where)


def optional(array: Any, what: str, where: str) -> Any:
    """The same for an array that may be left out."""
    return None if array is None else argument(array, what, where)


def output(array: Any, what: str, where: str) -> Any:
    """The same for an array that is written to."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise invalid(what, where, "an array that may be written to", "a read-only one")
    return argument(array, what, where)


def lent(memory: Any, what: str, where: str) -> Any:
    """The same for memory that the module keeps, or None."""
    if memory is None:
        return None
    checked = output(memory, what, where)
    return memory if isinstance(memory, np.ndarray) else checked


def _exporting(array: Any, what: str, where: str) -> Any:
    if not hasattr(array, "__dlpack__"):
        raise invalid(what, where, "an array", shown(array))
    return array


def check_tensor(tensor: Any, what: str, where: str) -> None:
    """Refuses what has no memory, or says more than its memory does."""
    if tensor.requires_grad:
        refuse_gradients(where, **{what: tensor})
    if tensor.is_neg():  # PyTorch negates when it reads: the memory holds the opposite numbers
        raise invalid(
            what, where, "a tensor without the negative bit, resolve_neg()", "one with it"
        )
    if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        got = f"one of {tensor.layout} on {tensor.device}"
        raise invalid(what, where, "a strided tensor on the CPU or CUDA", got)
    if type(tensor) is not torch.Tensor:  # a class of its own may have no memory
        try:
            tensor.data_ptr()
        except RuntimeError:
            raise invalid(what, where, "a tensor with memory", shown(tensor)) from None


def refuse_gradients(where: str, **tensors: Any) -> None:
    """Raises RuntimeError where PyTorch would record the call for a backward: there is none."""
    if torch is None or not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{where}: {name}: expected no gradient to be asked for, as under torch.no_grad(),"
                " got a tensor that requires one"
            )


def like(array: Any, what: str, where: str) -> Any:
    """A new array of the framework, device, shape and element type of the argument `what`."""
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(array.shape)
    return empty_like(array, _exporting(array, what, where).shape, where)


def empty_like(array: Any, shape: Sequence[int], where: str, dtype: str | None = None) -> Any:
    """A new array of the framework, device and (where none is named) element type of `array`."""
    if torch is not None and isinstance(array, torch.Tensor):
        return array.new_empty(shape, dtype=None if dtype is None else getattr(torch, dtype))
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype if dtype is None else dtype)
    raise invalid("out", where, f"an array, where inputs are {shown(array)}", None)


def host_ints(values: Any, what: str, where: str, dtype: type[np.signedinteger] = np.int32) -> Any:
    """Host arrays as they are; a device tensor copied to the host, for which the host waits."""
    if isinstance(values, np.ndarray):
        return argument(values, what, where)
    if torch is not None and isinstance(values, torch.Tensor):
        check_tensor(values, what, where)
        return values.cpu()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return int_array(values, what, where, dtype)
    return _exporting(values, what, where)


def int_array(
    values: Iterable[Any], what: str, where: str, dtype: type[np.signedinteger] = np.int32
) -> np.ndarray:
    """Python's integers as an array. Raises ValueError naming the first that is none, or too large.

    what  the entry's name, as in "kv_indices", which gets its index, or "segments[].span"
    """
    values = list(values)
    try:
        return np.fromiter(map(operator.index, values), dtype, len(values))
    except (TypeError, OverflowError, RuntimeError):
        limits = np.iinfo(dtype)
        head, _, tail = (what if "[]" in what else f"{what}[]").partition("[]")
        for i, value in enumerate(values):
            integer(value, f"{head}[{i}]{tail}", where, int(limits.min), int(limits.max))
        raise


def to_torch(tensor: SupportsDLPack) -> Any:
    """A torch.Tensor over the same memory, which it keeps alive."""
    if torch is None:
        raise ImportError("libmla.to_torch: torch is not installed")
    return torch.from_dlpack(_exporting(tensor, "tensor", "to_torch"))


def to_numpy(tensor: Any) -> np.ndarray:
    """A NumPy array over the same host memory, which it keeps alive; bf16 through ml_dtypes."""
    if str(_exporting(tensor, "tensor", "to_numpy").dtype) == "bfloat16":
        import ml_dtypes

        return np.from_dlpack(core.as_uint16(tensor)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(tensor)
