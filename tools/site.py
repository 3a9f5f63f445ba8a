"""Checks the built site: every link leads somewhere, and no page loads anything from elsewhere.

Links that a reader clicks may lead to the addresses in `CITED`.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

CITED = {
    "https://jobset.sigs.k8s.io",
    "https://github.com/pradyunsg/furo",
    "https://aclanthology.org/D19-5632/",
}
"""Addresses that a reader may click and that leave the site."""

CSS = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """Collects what a page loads, where it links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.styled = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.styled = tag == "style"
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag in ("a", "area"):
            self.links += [found["href"]] if "href" in found else []
        else:
            self.loads += [found[name] for name in ("src", "href", "data") if found.get(name)]
            self.loads += [part.split()[0] for part in found.get("srcset", "").split(",") if part]
        self.loads += css_addresses(found.get("style", ""))
        if "srcdoc" in found:
            self.loads += Page(found["srcdoc"]).loads

    def handle_data(self, data: str) -> None:
        if self.styled:
            self.loads += css_addresses(data)


def css_addresses(text: str) -> list[str]:
    """Returns the addresses that a style sheet loads."""
    return [url or sheet for url, sheet in CSS.findall(text)]


def problems(site: Path) -> Iterator[str]:
    """Yields a line for each address that does not lead to a file of the site."""
    site = site.resolve()
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: has no pages"
    loads = {path: page.loads for path, page in pages.items()}
    loads |= {path: css_addresses(path.read_text("utf-8")) for path in site.rglob("*.css")}
    links = {path: [x for x in page.links if x not in CITED] for path, page in pages.items()}
    for found in (loads, links):
        for path, addresses in found.items():
            for address in addresses:
                if problem := _problem(address, path, site, pages):
                    yield f"{path.relative_to(site)}: {address}: {problem}"


def _problem(address: str, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Returns what is wrong with an address on a page, or None."""
    parts = urlsplit(address)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return "leaves the site"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(site) or not target.is_file():
        return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


def main(arguments: Sequence[str]) -> None:
    """Prints the problems of a site and exits with status 1 if there are any."""
    found = list(problems(Path(arguments[0])))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main(sys.argv[1:])
