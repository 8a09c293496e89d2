"""The exceptions of ksopt: one root; each class also derives from a matching built-in."""


class KsoptError(Exception):
    """The root of every exception that ksopt raises; its text is a sentence for the user."""


class InvalidInputError(KsoptError, ValueError):
    """An argument is not allowed: the message names the value and the allowed ones."""


class UnavailableError(KsoptError, RuntimeError):
    """The machine lacks a required device, compiler or library."""


class CompilationError(KsoptError, RuntimeError):
    """Device or host code did not compile; the message includes the compiler's output."""


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its type if it has none.

    Example:
        >>> first_line(RuntimeError("no kernel")), first_line(ValueError())
        ('no kernel', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
