"""What the compatible interfaces do with arrays of PyTorch and NumPy."""

import math
from typing import Any, TypeAlias

import numpy as np

from .. import _torch_ops
from .._arrays import check_tensor, refuse_gradients
from .._checks import invalid, shown
from .._module import torch

# A torch.Tensor or a numpy.ndarray.
Array: TypeAlias = Any


def is_tensor(array: Array) -> bool:
    """Whether it is PyTorch's."""
    return torch is not None and isinstance(array, torch.Tensor)


def check_arrays(where: str, **arrays: Array) -> None:
    """Raises unless each is PyTorch's or NumPy's, with memory that says all of it."""
    _check(where, arrays, "an array of PyTorch or NumPy", np.ndarray)


def check_tensors(where: str, **tensors: Array) -> None:
    """The same for PyTorch's alone."""
    _check(where, tensors, "a torch.Tensor", ())


def check_rank(where: str, rank: int, **arrays: Array) -> None:
    """Raises unless each array, already checked, has so many dimensions."""
    for name, array in arrays.items():
        if array.ndim != rank:
            raise invalid(name, where, f"{rank} dimensions", array.ndim)


def check_indices(where: str, **arrays: Array) -> None:
    """The same for index arrays, of PyTorch or NumPy: one dimension of int32."""
    check_arrays(where, **arrays)
    for name, array in arrays.items():
        dtype = str(array.dtype).removeprefix("torch.")
        if array.ndim != 1 or dtype != "int32":
            raise invalid(name, where, "one dimension, int32", f"{list(array.shape)} {dtype}")


def check_writable(where: str, **arrays: Array) -> None:
    """Raises unless each array, already checked, can be written to entry by entry."""
    for name, array in arrays.items():
        if not is_tensor(array) and not array.flags.writeable:
            raise invalid(name, where, "an array that may be written to", "a read-only one")
        if len(array) > 1 and strides(array)[0] == 0:
            raise invalid(name, where, "memory of its own for each entry", "stride 0")


def _check(where: str, arrays: dict[str, Array], expected: str, others: Any) -> None:
    is_compiling = _torch_ops.is_compiling()
    for name, array in arrays.items():
        if is_tensor(array):
            if not is_compiling:
                check_tensor(array, name, where)
        elif not isinstance(array, others):
            raise invalid(name, where, expected, shown(array))
        elif array.dtype.kind in "OSUMm":
            raise invalid(name, where, "an array of numbers", array.dtype)
    if is_compiling:
        refuse_gradients(where, **arrays)


def float32(array: Array) -> Array:
    """The array, converted where it is of another type."""
    if is_tensor(array):
        return array.to(torch.float32)
    return array.astype(np.float32, copy=False)


def host_copy(array: Array) -> np.ndarray:
    """A copy on the host; from a device the only one, for which the host waits."""
    if not is_tensor(array):
        return np.array(array)
    return array.cpu().numpy() if array.is_cuda else array.numpy().copy()


def store(array: Array, buffer: Array) -> None:
    """Copies an array into the first entries of a buffer, which may be on another device."""
    head = buffer[: len(array)]
    if is_tensor(head):
        head.copy_(as_tensor(array))
    else:
        head[:] = host_copy(array)


def as_tensor(array: Array) -> Any:
    """PyTorch's itself; NumPy's copied, since PyTorch takes no reversed or read-only array."""
    return array if is_tensor(array) else torch.from_numpy(host_copy(array))


def strides(array: Array) -> tuple[int, ...]:
    """Strides in elements; of an empty array as if without gaps, since NumPy gives it none."""
    if 0 in array.shape:
        return tuple(math.prod(array.shape[d + 1 :]) for d in range(array.ndim))
    if is_tensor(array):
        return array.stride()
    return tuple(step // array.itemsize for step in array.strides)


def aligned_bytes(memory: Array) -> Array:
    """Memory without gaps as bytes, from the first that is at a multiple of 64."""
    flat = memory.reshape(-1).view(torch.uint8 if is_tensor(memory) else np.uint8)
    address = flat.data_ptr() if is_tensor(flat) else flat.__array_interface__["data"][0]
    return flat[-address % 64 :]
