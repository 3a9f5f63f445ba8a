"""The check of the built site finds what it is to find."""

from pathlib import Path

import pytest

from tools import site

GOOD = """
<link rel="stylesheet" href="_static/a.css"><img src="data:image/png;base64,AA">
<a href="sub/b.html#here">b</a><a href="#top" id="top">top</a>
<a href="https://jobset.sigs.k8s.io">cited</a>
<svg><path d="M0 0"/></svg><script src="_static/a%20b.js"></script>
"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    for name, text in {
        "a.html": GOOD,
        "sub/b.html": '<p id="here"><a href="../a.html">a</a>',
        "_static/a.css": "p { background: url(data:image/svg+xml;utf8,x); }",
        "_static/a b.js": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def test_a_site_without_problems(built: Path, tmp_path: Path) -> None:
    assert list(site.problems(built)) == []
    (tmp_path / "empty").mkdir()
    assert len(list(site.problems(tmp_path / "empty"))) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<link href="//x.org/a.css">', "leaves the site"),
        ('<img srcset="//x.org/a.png 2x">', "leaves the site"),
        ("""<iframe srcdoc="<img src='//x.org/a.png'>"></iframe>""", "leaves the site"),
        ("<style>@import 'http://x.org/a.css';</style>", "leaves the site"),
        ('<a href="https://x.org">not cited</a>', "leaves the site"),
        ('<a href="c.html">a</a>', "no such file"),
        ('<a href="sub/b.html#there">a</a>', "no such anchor"),
    ],
)
def test_problems_are_found(built: Path, text: str, problem: str) -> None:
    (built / "c_page.html").write_text(text, "utf-8")
    (found,) = site.problems(built)
    assert found.startswith("c_page.html: ")
    assert found.endswith(problem)


def test_style_sheets_are_read(built: Path) -> None:
    (built / "_static/a.css").write_text('@import "https://x.org/f.css"', "utf-8")
    (found,) = site.problems(built)
    assert found == "_static/a.css: https://x.org/f.css: leaves the site"
