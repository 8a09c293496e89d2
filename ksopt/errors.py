"""The exceptions of ksopt: one root, each class also the built-in a caller would expect."""


class KsoptError(Exception):
    """Root of every exception that ksopt raises on purpose; its text is a sentence for the user."""


class InvalidInputError(KsoptError, ValueError):
    """An argument is not allowed: the message names what was given and what is allowed."""


class UnavailableError(KsoptError, RuntimeError):
    """Something this machine would need (a device, a compiler, a library) is not there."""


class CompilationError(KsoptError, RuntimeError):
    """Device or host code did not compile; the message carries the compiler's own words."""
