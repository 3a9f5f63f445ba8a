"""Parses JSON that may come from anyone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformer_jax.errors import UserError


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text; bytes must be UTF-8, with or without a byte order mark.

    UserError: the text is not JSON, is not UTF-8, or is beyond what Python's parser takes: nested
    too deeply, or with an integer of too many digits.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise UserError("not JSON that can be read (nested too deeply)") from error
    except UnicodeDecodeError as error:
        raise UserError(f"not JSON (byte {error.start + 1} is not UTF-8)") from error
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error})") from error
    except ValueError as error:  # int() limits the number of digits
        raise UserError("not JSON that can be read (an integer has too many digits)") from error


def json_digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys and the layout of its
    text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
