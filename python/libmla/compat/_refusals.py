"""What a compatible interface accepts by name and cannot do."""


def not_implemented(what: str, where: str) -> NotImplementedError:
    """The error of a call that asks for something that is not there."""
    return NotImplementedError(f"{where}: {what} is not implemented")
