"""The run card of a result: what the run was trained from, so that one command trains it again.

A result file holds it under "card": a format number, the config with its seed, and the provenance
of the run: versions of the software, the devices, and digests of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from transformer_jax.config import Config, from_json, to_json
from transformer_jax.data.order import LATEST
from transformer_jax.errors import UserError
from transformer_jax.files import parse_json
from transformer_jax.runs import run
from transformer_jax.runs.run import Run
from transformer_jax.text.corpus import Corpora, Corpus

FORMAT = 1


@dataclass(frozen=True)
class Card:
    """A run card, read from a file."""

    name: str  # FILE or FILE#ROW
    config: Config
    provenance: dict[str, Any]  # as in `Run`

    @property
    def order(self) -> int:
        """The version of the order in which training draws pairs."""
        return self.provenance["order"]

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

    def require_start(self, init_from: epath.PathLike | None) -> None:
        """UserError: the run starts with the parameters of another, and `init_from` is None."""
        if init_from is None and "init_from" in self.provenance:
            raise UserError(
                f"card {self.name}: the run starts with the parameters of "
                f"{self.provenance['init_from']['run']}; give --init-from"
            )

    def require_data(self, corpora: Corpora) -> None:
        """Checks that the corpora are those of the card, wherever their files are.

        UserError: one is missing or another; the message names it, and the digests of its files.
        """
        for part, found in corpora._asdict().items():
            wanted = getattr(self.config.data, part)
            if len(found) != len(wanted):
                raise UserError(
                    f"data.{part}: names {len(found)} corpora; card {self.name} was trained with "
                    f"{len(wanted)}: {', '.join(wanted)}"
                )
            for corpus, name in zip(found, wanted, strict=True):
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


def make(trained: Run) -> dict[str, Any]:
    """Returns the card of a run as JSON values."""
    return {"format": FORMAT, "config": to_json(trained.config), "provenance": trained.provenance}


def load(name: str) -> Card:
    """Reads the card in a result file, FILE, or that of a row of a study, FILE#ROW.

    UserError: there is none, or it is of another format.
    """
    path, row = name, ""
    if "#" in name and not Path(name).is_file():
        path, _, row = name.rpartition("#")
    try:
        stored = parse_json(Path(path).read_bytes())
    except (UserError, OSError) as error:
        raise UserError(f"card {name}: {getattr(error, 'strerror', None) or error}") from error
    card = _of_row(name, stored, row).get("card")
    if not isinstance(card, dict):
        raise UserError(f'card {name}: is no result with a run card: "card" is missing')
    if card.get("format") != FORMAT:
        raise UserError(f"card {name}: format={card.get('format')!r}: this version reads {FORMAT}")
    try:
        config = from_json(card.get("config"))
    except UserError as error:
        raise UserError(f"card {name}: {error}") from error
    return Card(name, config, _checked(name, config, card.get("provenance")))


def _of_row(name: str, stored: Any, row: str) -> dict[str, Any]:
    """Returns the values that hold the card. UserError: no such row, or one must be named."""
    values = stored if isinstance(stored, dict) else {}
    rows = values.get("rows")
    rows = rows if isinstance(rows, dict) else {}
    if not row and ("card" in values or not rows):
        return values
    if not isinstance(rows.get(row), dict):
        known = ", ".join(rows) or "there are none"
        raise UserError(f"card {name}: name one of its rows, as FILE#ROW: {known}")
    return rows[row]


def _checked(name: str, config: Config, provenance: Any) -> dict[str, Any]:
    """Returns a card's provenance. UserError: a part that is read is missing, damaged or newer."""
    found = provenance if isinstance(provenance, dict) else {}
    order, digests = found.get("order"), found.get("data_digests")
    if type(order) is int and order > LATEST:
        raise UserError(f"card {name}: provenance.order={order}: this version reads 1 to {LATEST}")
    digests = digests if isinstance(digests, dict) else {}
    start = found.get("init_from", {"run": ""})
    whole = {
        "order": type(order) is int and order >= 1,
        "versions": _are_texts(found.get("versions")),
        "file_digests": _are_texts(found.get("file_digests")),
        "init_from": isinstance(start, dict) and isinstance(start.get("run"), str),
    }
    for part in ("train", "dev"):
        names = {*getattr(config.data, part)}
        good = _are_texts(digests.get(part)) and digests[part].keys() == names
        whole[f"data_digests.{part}"] = good
    for part, good in whole.items():
        if not good:
            raise UserError(f"card {name}: provenance.{part} is missing or damaged")
    return found


def _are_texts(values: Any) -> bool:
    """Returns whether a JSON value is an object whose values are all strings."""
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
