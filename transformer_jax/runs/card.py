"""The run card of a result: what the run was trained from, so that one command trains it again.

A result file holds it under "card": a format number, the config with its seed, and the provenance
of the run: versions of the software, the devices, and digests of the data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from etils import epath

from transformer_jax.config import Config, from_json, to_json
from transformer_jax.data.order import VERSION
from transformer_jax.errors import UserError, about
from transformer_jax.files import parse_json
from transformer_jax.runs import run
from transformer_jax.text.corpus import Corpora, Corpus

FORMAT = 1


@dataclass(frozen=True)
class Card:
    """A run card, read from a file."""

    name: str  # FILE or FILE#ROW
    config: Config
    provenance: dict[str, Any]  # as in `Run`

    def require_versions(self) -> None:
        """Checks that the software is that of the card. UserError: some has another version."""
        here, stored = run.versions(), self.provenance["versions"]
        changed = [
            f"{name} {stored.get(name, 'none')} -> {here.get(name, 'none')}"
            for name in {**stored, **here}
            if stored.get(name) != here.get(name)
        ]
        if changed:
            raise UserError(
                f"card {self.name}: other versions are installed ({', '.join(changed)}); install "
                "those, or give --any-versions for a run that may differ"
            )

    def require_data(self, corpora: Corpora) -> None:
        """Checks that the corpora are those of the card, wherever their files are.

        UserError: one is missing or another; the message names it, and the digests of its files.
        """
        for part, here in corpora._asdict().items():
            names = getattr(self.config.data, part)
            if len(here) != len(names):
                raise UserError(
                    f"data.{part}: names {len(here)} corpora; card {self.name} was trained with "
                    f"{len(names)}: {', '.join(names)}"
                )
            for corpus, name in zip(here, names, strict=True):
                self._require(corpus, part, name)

    def _require(self, corpus: Corpus, part: str, name: str) -> None:
        digest = self.provenance["data_digests"][part][name]
        try:
            if corpus.digest == digest:
                return
            problem = f"data.{part}={corpus.name}: is another text than that of card {self.name}"
        except (UserError, OSError) as error:
            problem = f"data.{part}: {error}"
        files = self.provenance["file_digests"]
        needed = [f"{Path(path).name}: {files[path]}" for path in files if path in name]
        raise UserError(
            f"{problem}; it must have this SHA-256: {', '.join(needed or [digest])}; "
            f"--config.data.{part} names files elsewhere"
        )


def require_start(
    begins: str,
    start: dict[str, Any] | None,
    init_from: epath.PathLike | None,
    options: list[str],
    otherwise: str = "",
) -> None:
    """Checks that a run starts with the parameters that it has started with before.

    begins, otherwise: the beginning of the message, and its end after what to do. start: what the
    run's provenance holds as "init_from". UserError: the run starts with the parameters of another,
    and `init_from` is None or `options` say that others are taken; or it does not, and `init_from`
    names one.
    """
    if start is None and init_from is not None:
        remedy = f"random parameters; leave out --init-from={init_from}"
    elif start is not None and init_from is None:
        remedy = f"the parameters of {start['run']}; give --init-from={start['run']}"
    elif start is not None and (wanted := start.get("options", [])) != options:
        which = " ".join(wanted) or "no other option"
        remedy = f"other parameters of {start['run']}; give --init-from with {which}"
    else:
        return
    raise UserError(f"{begins} {remedy}{otherwise}")


def make(trained: run.Run) -> dict[str, Any]:
    """Returns the card of a run as JSON values."""
    return {"format": FORMAT, "config": to_json(trained.config), "provenance": trained.provenance}


def load(name: str) -> Card:
    """Reads the card in a result file, FILE, or that of a row of a study, FILE#ROW.

    UserError: there is none, or it is damaged or of another format.
    """
    path, row = name, ""
    if "#" in name and not Path(name).is_file():
        path, _, row = name.rpartition("#")
    with about(f"card {name}"):
        card = _find(parse_json(Path(path).read_bytes()), row)
        if card.get("format") != FORMAT:
            raise UserError(f"format={card.get('format')!r}: this version reads {FORMAT}")
        config = from_json(card.get("config"))
        provenance = card.get("provenance")
        _check(config, provenance if isinstance(provenance, dict) else {})
    return Card(name, config, card["provenance"])


def _find(stored: Any, row: str) -> dict[str, Any]:
    """Returns the card in a result. UserError: there is none, or a row must be named."""
    values = stored if isinstance(stored, dict) else {}
    rows = values.get("rows")
    if isinstance(rows, dict) and (row or "card" not in values):
        values = rows.get(row)
        if not isinstance(values, dict):
            raise UserError(f"name one of its rows, as FILE#ROW: {', '.join(rows)}")
    elif row:
        raise UserError("name one of its rows, as FILE#ROW: there are none")
    if not isinstance(values.get("card"), dict):
        raise UserError('is no result with a run card: "card" is missing')
    return values["card"]


def _check(config: Config, provenance: dict[str, Any]) -> None:
    """UserError: a part of the provenance that is read is missing, damaged or of another order."""
    order, digests = provenance.get("order"), provenance.get("data_digests")
    if type(order) is int and order != VERSION:
        raise UserError(f"provenance.order={order}: this version reads {VERSION}")
    start = provenance.get("init_from", {"run": ""})
    intact = {
        "order": type(order) is int,
        "versions": _are_texts(provenance.get("versions")),
        "file_digests": _are_texts(provenance.get("file_digests")),
        "init_from": isinstance(start, dict)
        and isinstance(start.get("run"), str)
        and isinstance(start.get("options", []), list),
    }
    for part in ("train", "dev"):
        digest_of = digests.get(part) if isinstance(digests, dict) else None
        names = {*getattr(config.data, part)}
        intact[f"data_digests.{part}"] = _are_texts(digest_of) and digest_of.keys() == names
    for part, is_intact in intact.items():
        if not is_intact:
            raise UserError(f"provenance.{part} is missing or damaged")


def _are_texts(values: Any) -> TypeGuard[dict[str, str]]:
    """Returns whether a JSON value is an object whose values are all strings."""
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
