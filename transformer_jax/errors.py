"""The error for what a user can correct."""

from __future__ import annotations


class UserError(ValueError):
    """An option, a config, a file or an argument is wrong.

    The message is one line that names it, its value and what would be right. The command line
    prints the message without a traceback. Any other exception is a defect and keeps its traceback.
    """
