"""Other libraries' interfaces over this one: an engine changes an import.

Each module has the names, arguments, defaults and shapes of its library's public documentation, and
raises NotImplementedError, naming it, for what it cannot do.
"""
