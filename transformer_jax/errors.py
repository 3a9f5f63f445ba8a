"""The error that a user's mistake raises, and text that is safe to print."""

import unicodedata


class UserError(ValueError):
    """An option, a config, a file or an argument is wrong.

    The message is one line that names it, its value and what would be right. The command line
    prints the message without a traceback. Any other exception is a defect and keeps its traceback.
    """


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
