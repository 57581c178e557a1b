"""The array libraries that the tests hand to libmla, behind one small interface."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

try:
    import torch
except ImportError:
    torch = None

NUMPY_DTYPES = {
    "fp32": np.dtype("f4"),
    "fp16": np.dtype("f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
# A few units in the last place of the output, which is a mean of values below 4 or so.
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


@dataclass(frozen=True)
class Framework:
    """Arrays of one library on one device."""

    name: str
    device: str = "cpu"

    def array(self, values, dtype):
        """An array of float64 values, rounded to `dtype`."""
        rounded = np.asarray(values, np.float64).astype(NUMPY_DTYPES[dtype])
        return self.from_numpy(rounded)

    def from_numpy(self, array):
        """The same as an array of this framework, on its device."""
        if self.name == "numpy":
            return array
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(array).to(self.device)

    def empty(self, shape, dtype):
        """An array of NaN, so that what is not written shows."""
        return self.array(np.full(shape, np.nan), dtype)

    def view(self, tensor):
        """What libmla handed out, as an array of this framework over the same memory."""
        import libmla

        return libmla.to_numpy(tensor) if self.name == "numpy" else libmla.to_torch(tensor)


def float64(array):
    """The values of any array, on the host."""
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().cpu().double().numpy()
    return np.asarray(array).astype(np.float64)
