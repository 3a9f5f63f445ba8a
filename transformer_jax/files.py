"""Paths on disks and in object storage, atomic writes, and JSON."""

import atexit
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from etils import epath

from transformer_jax.errors import UserError, require_unicode

AnyPath = Path | epath.Path
"""A path on a disk, or (`epath.Path`) in a bucket of Google Cloud Storage.

A bucket holds objects, which are written whole: it cannot rename or append, and has no folders
other than the common beginnings of names.
"""

_URL = re.compile(r"(\w[\w+.-]*):/")  # Path has made one slash of two
_BUCKET_URL = re.compile(r"gs://[\w.-]+(/(?!\.\.?(/|$))[\w.=+@-]+)+/?")
"""Names with other characters, such as "#" or "*", mean something else to Orbax or to gcsfs."""

temporaries = ExitStack()
"""What removes the temporary files of this process when it ends."""
atexit.register(temporaries.close)


def exit_now(status: int) -> NoReturn:
    """Ends this process without waiting for its threads, as Python's own end does, beside which
    XLA's may crash. Temporary files are removed."""
    temporaries.close()
    os._exit(status)


def find_path(name: epath.PathLike) -> AnyPath:
    """Returns the path of a folder on a disk or, for gs://BUCKET/NAME, in a bucket.

    UserError: the name is not UTF-8 or another URL, the bucket cannot be read, or gcsfs is not
    installed.
    """
    text = os.fspath(name)
    require_unicode(text)
    url = _URL.match(text)
    if url is None:
        return Path(text)
    if url[1] != "gs":
        raise UserError(
            f"{text}: {url[1]}:// is not supported; name a folder on a disk or gs://BUCKET/NAME"
        )
    if not _BUCKET_URL.fullmatch(text):
        raise UserError(
            f"{text}: must be a str gs://BUCKET/NAME with letters, digits and -_.=+@/ only"
        )
    _connect(text)
    return epath.Path(text)


def local_path(name: epath.PathLike, option: str) -> Path:
    """Returns the path `name` of `option`. UserError: it is a URL."""
    if url := _URL.match(os.fspath(name)):
        raise UserError(f"{option}={name}: {url[1]}:// is not supported; name a path on a disk")
    return Path(name)


def cache_folder(name: str) -> Path:
    """Returns the folder `name` of this package in the user's cache; it may not exist yet.

    Users without a home folder to write to, as in containers, have it in the temporary folder.
    UserError: there, it belongs to another user.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "transformer_jax" / name
    with suppress(RuntimeError, OSError):  # no home, or one that cannot be looked into
        folder = Path.home() / ".cache"
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if os.access(nearest, os.W_OK):
            return folder / "transformer_jax" / name
    private = Path(tempfile.gettempdir()) / f"transformer_jax-{os.geteuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    about = private.lstat()  # not of what another user's link leads to
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise UserError(f"{private}: others can write to it; name a folder in XDG_CACHE_HOME")
    return private / name


def files_below(folder: AnyPath) -> dict[str, AnyPath]:
    """Returns all files below a folder, by their names relative to it."""
    if isinstance(folder, epath.Path):  # one request for a thousand objects
        import fsspec  # which looks through all packages, and is for object storage only

        system, root = fsspec.url_to_fs(str(folder))
        names = [name.removeprefix(f"{root}/") for name in system.find(root)]
        # Google's console makes an object "NAME/" of an empty folder.
        return {name: folder / name for name in names if name and not name.endswith("/")}
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}


def remove_folder(folder: AnyPath) -> None:
    """Deletes a folder and all that it holds."""
    epath.Path(folder).rmtree(missing_ok=True)


def flush_to_disk(path: AnyPath) -> None:
    """Flushes a file to the disk. An object is durable as soon as it is written."""
    if isinstance(path, Path):
        with path.open("r+b") as file:
            os.fsync(file.fileno())


@contextmanager
def named(path: AnyPath, temporary: Path | None = None) -> Iterator[None]:
    """Names `path` in an OSError that names no file, such as that of a full disk, or `temporary`,
    in place of which it is written."""
    unnamed = (None, temporary and os.fspath(temporary))
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in unnamed:  # not one with a text of its own
            error.filename = os.fspath(path)
        raise


def write_whole(path: AnyPath, text: str) -> None:
    """Writes a UTF-8 text file in place of `path`, whole or not at all.

    On a disk, the text is first written to a temporary file beside `path` and flushed.
    """
    if isinstance(path, epath.Path):
        path.write_bytes(text.encode())
        return
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, which replaces `path` if the block has no error."""
    # Not by the number of the process, which another container may have, too; and without the
    # whole name, which may be as long as a name can be.
    temporary = path.with_name(f".{path.name[:32]}.{secrets.token_hex(8)}.tmp")
    try:
        with named(path, temporary):
            yield temporary
            flush_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


@functools.cache
def _connect(url: str) -> None:
    """Sets up gcsfs, and checks that objects can be listed. UserError: they cannot."""
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{url}: needs gcsfs; pip install 'transformer-jax[gcs]'")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # its errors are exceptions, too
    os.environ["EPATH_USE_TF"] = "false"  # epath would prefer TensorFlow if it is installed
    import fsspec.config

    # TensorStore writes objects of which a cached listing does not know.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    try:
        files_below(epath.Path(url))
    except FileNotFoundError as error:
        raise UserError(f"{url}: no such bucket") from error
    except Exception as error:  # those of gcsfs, aiohttp and google-auth have no common base
        raise UserError(
            f"{url}: {error}; log in with 'gcloud auth application-default login', or name the "
            "file of a service account in GOOGLE_APPLICATION_CREDENTIALS"
        ) from error
