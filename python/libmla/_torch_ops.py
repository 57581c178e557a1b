"""The calls as PyTorch operators, so that torch.compile takes them whole."""

import weakref
from collections.abc import Callable
from typing import Any

from ._module import torch

# Operators take numbers and tensors only: an object is passed as its key.
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_key = 0


def register(target: Any) -> int:
    """The key of an object, for as long as it lives."""
    global _next_key
    _next_key += 1
    _objects[_next_key] = target
    return _next_key


def find(key: int) -> Any:
    """The object of a key."""
    return _objects[key]


# There are operators from PyTorch 2.4 on; without them nothing is traced and none is called.
_has_operators = torch is not None and hasattr(torch.library, "custom_op")

is_compiling: Callable[[], bool] = (
    torch.compiler.is_compiling if _has_operators else lambda: False  # PyTorch knows its own
)


def operator(name: str, schema: str) -> Callable[[Callable[..., None]], Any]:
    """Registers a function that writes to its arguments marked so in the schema."""

    def decorate(function: Callable[..., None]) -> Any:
        if not _has_operators:
            return function
        mutated = [part.split()[-1] for part in schema.strip("()").split(",") if "!)" in part]
        registered = torch.library.custom_op(
            f"libmla::{name}", function, mutates_args=mutated, schema=f"{schema} -> ()"
        )
        registered.register_fake(lambda *arguments: None)
        return registered

    return decorate


def layers(pool: Any) -> list[Any]:
    """The layers of a pool as tensors, for the operators that read or write them."""
    if not _has_operators or (pool.device != "cpu" and not torch.cuda.is_available()):
        return []
    return [torch.from_dlpack(pool.layer(layer)) for layer in range(pool.num_layers)]


def written(pool_layer: Any, layer: Any) -> None:
    """After a write to a layer, for the tensor that stood for it: PyTorch may pass a copy.

    Such a copy is written back to the layer later, so it must hold what the layer holds.
    """
    if pool_layer.data_ptr() != layer.data_ptr():
        pool_layer.copy_(layer)
