"""Arguments that only this side can check, and the four parts of the message where one is wrong."""

import operator
from typing import Any

_LOW, _HIGH = -(2**63), 2**63 - 1


def shown(value: object) -> str:
    """A value as a message has it: numbers and names themselves, else what it is."""
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def invalid(what: str, where: str, expected: str, got: object) -> ValueError:
    """The library's message of a wrong argument, for what is found out on this side."""
    return ValueError(f"{where}: {what}: expected {expected}, got {got}")


def integer(
    value: Any,
    what: str,
    where: str,
    low: int = _LOW,
    high: int = _HIGH,
    expected: str = "",
) -> int:
    """An integer of Python, NumPy or PyTorch within a range, as Python's; never rounded."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # PyTorch's tensors raise either
        raise invalid(what, where, expected or "an integer", shown(value)) from None
    if not low <= number <= high:
        raise invalid(what, where, expected or f"{low} to {high}", number)
    return number


def number(value: Any, what: str, where: str) -> float:
    """A real number, as Python's float."""
    try:
        if not isinstance(value, str):  # which float would read
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise invalid(what, where, "a number", shown(value))


# What fp32 holds above 0.
_FP32_LEAST, _FP32_MOST = 2.0**-149, (2 - 2.0**-23) * 2.0**127


def scale(value: Any, what: str, where: str) -> float:
    """A softmax scale. The library has it in fp32, and could not say what was given."""
    given = number(value, what, where)
    if not _FP32_LEAST <= given <= _FP32_MOST:
        expected = (
            "a finite value above 0, within fp32, the scale of the model's original head width"
            " (it has no default)"
        )
        raise invalid(what, where, expected, given)
    return given


def text(value: Any, what: str, where: str) -> str:
    """A string that has a UTF-8 form."""
    if not isinstance(value, str):
        raise invalid(what, where, "a string", shown(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(what, where, "a string of Unicode characters", repr(value)) from None
    return value


def instance(value: Any, kind: type[Any], what: str, where: str) -> Any:
    """An object of a class."""
    if not isinstance(value, kind):
        name = kind.__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise invalid(what, where, f"{article} {name}", shown(value))
    return value


def entries(values: Any, what: str, where: str) -> list[Any]:
    """What a sequence holds."""
    try:
        return list(values)
    except TypeError:
        raise invalid(what, where, "a sequence", shown(values)) from None


def pair(value: Any, what: str, where: str, expected: str) -> Any:
    """Two things: a tuple, a list or a row of an array."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise invalid(what, where, expected, shown(value))
    if len(value) != 2:
        raise invalid(what, where, expected, f"{len(value)} of them")
    return value
