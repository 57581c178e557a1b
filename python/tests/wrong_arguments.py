"""How an argument of each kind can be wrong, made from a good one of PyTorch or plain Python."""

import numpy as np
from frameworks import torch

FOUR_PARTS = r"(?s)^[\w.:]+: .+: expected .+, got .+"
HUGE = 2**70


class Thing:
    """No array, number, record or sequence."""


# What a parameter of each kind is refused as, made from a good argument.
ARRAY = {
    "none": lambda good: None,
    "number": lambda good: 5,
    "text": lambda good: "array",
    "thing": lambda good: Thing(),
    "meta": lambda good: good.to("meta"),
    "sparse": lambda good: good.to_sparse(),
    "negative": lambda good: good._neg_view(),
    "dtype": lambda good: good.to(torch.float64),
    "rank": lambda good: good[None],
    "scalar": lambda good: good.reshape(-1)[0],
    "objects": lambda good: np.empty(good.shape, object),
    "texts": lambda good: np.full(good.shape, "1.0"),
}
INTEGERS = {
    "none": lambda good: None,
    "number": lambda good: 5,
    "text": lambda good: "12",
    "thing": lambda good: Thing(),
    "fractions": lambda good: [0.5] * len(good),
    "texts": lambda good: ["0"] * len(good),
    "huge": lambda good: [HUGE] * len(good),
    "64 bits": lambda good: [2**64] * len(good),
    "dtype": lambda good: np.zeros(len(good), np.float32),
    "rank": lambda good: np.zeros((len(good), 1), np.int32),
    "scalar": lambda good: torch.tensor(0, dtype=torch.int32),
    "objects": lambda good: np.zeros(len(good), object),
    "meta": lambda good: torch.zeros(len(good), dtype=torch.int32, device="meta"),
}
INTEGER = {
    "none": lambda good: None,
    "fraction": lambda good: 1.5,
    "text": lambda good: "1",
    "thing": lambda good: Thing(),
    "huge": lambda good: HUGE,
    "very negative": lambda good: -HUGE,
    "negative": lambda good: -1,
}
NUMBER = {
    "none": lambda good: None,
    "text": lambda good: "1",
    "thing": lambda good: Thing(),
    "list": lambda good: [1.0],
    "huge": lambda good: 10**400,
    "nan": lambda good: float("nan"),
}
TEXT = {
    "none": lambda good: None,
    "number": lambda good: 5,
    "bytes": lambda good: b"main",
    "half a surrogate": lambda good: "\ud800",
}
OBJECT = {
    "none": lambda good: None,
    "number": lambda good: 5,
    "text": lambda good: "object",
    "thing": lambda good: Thing(),
}
DEVICE = {"none": lambda good: None, "number": lambda good: 5, "text": lambda good: "tpu"}
BASE = {**INTEGER, "unknown": lambda good: 2}
PAIRS = {
    **OBJECT,
    "numbers": lambda good: [1, 2],
    "threes": lambda good: [(1, 2, 3)],
    "things": lambda good: [(Thing(), Thing())],
    "huge": lambda good: [(HUGE, HUGE)],
    "fractions": lambda good: [(1.5, 1.5)],
}


def left_out(kind, *more):
    """A parameter that may be None, or lacks other ways to be wrong."""
    return {name: make for name, make in kind.items() if name not in ("none", *more)}


def torch_only(kind):
    """A parameter that takes no NumPy either."""
    return {**kind, "numpy": lambda good: good.numpy()}
