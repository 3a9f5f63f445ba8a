"""The error that a user's mistake raises, and text that is safe to print."""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An option, a config, a file or an argument is wrong.

    The message is one line that names it, its value and what would be right. The command line
    prints the message without a traceback. Any other exception is a defect and keeps its traceback.
    """


@contextmanager
def about(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Begins errors of the user with what they are about, such as a path, unless they do already.

    Errors of the operating system and of `kinds` become errors of the user.
    """
    try:
        yield
    except (UserError, OSError, *kinds) as error:
        reason = str(getattr(error, "strerror", None) or error)
        begin = "" if reason.startswith(str(what)) else f"{what}: "
        raise UserError(begin + reason) from error


def is_unicode(text: str) -> bool:
    """Returns whether `text` can be written as UTF-8: it has no lone surrogates, with which Python
    stands for the bytes of a file's name that are not UTF-8."""
    return not re.search("[\ud800-\udfff]", text)


def require_unicode(name: str) -> None:
    """UserError: a path has bytes that are not UTF-8, and could not be written to files."""
    if not is_unicode(name):
        raise UserError(f"{name}: is not UTF-8; give the file or folder another name")


def printable(text: str) -> str:
    """Returns `text` in one line, with control characters as visible escapes such as \\x1b.

    Otherwise a sentence or a key from a file could move the cursor, change colors or set the title
    of the reader's terminal.
    """
    controls = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates and line breaks
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in controls else char
        for char in text
    )
