"""The check of the built site finds what it is to find."""

from pathlib import Path

from tools import site

GOOD = """
<link rel="stylesheet" href="_static/a.css"><img src="data:image/png;base64,AA">
<a href="sub/b.html#here">b</a><a href="#top" id="top">top</a>
<a href="https://jobset.sigs.k8s.io">cited</a>
<svg><path d="M0 0"/></svg><script src="_static/a%20b.js"></script>
"""
BAD = """
<link href="//x.org/a.css"><img srcset="//x.org/b.png 2x"><iframe src="http://x.org/c"></iframe>
<iframe srcdoc="<img src='//x.org/d.png'>"></iframe><p style="background: url(http://x.org/e.png)">
<style>@import 'http://x.org/f.css';</style><a href="https://x.org/g">not cited</a>
<a href="../outside.html">a</a><a href="c.html">a</a>
<a href="sub/b.html#there">a</a><a href="#nowhere">a</a>
"""


def problems_of(folder: Path, page: str, style: str) -> set[tuple[str, ...]]:
    """The problems of a site with these texts, each as its parts."""
    texts = {"a.html": page, "sub/b.html": '<p id="here"><a href="../a.html">a</a>'}
    for name, text in (texts | {"_static/a.css": style, "_static/a b.js": ""}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return {tuple(problem.split(": ")) for problem in site.problems(folder)}


def test_problems_are_found(tmp_path: Path) -> None:
    links = [f"//x.org/{name}" for name in ("a.css", "b.png", "d.png")]
    links += ["http://x.org/c", "http://x.org/e.png", "http://x.org/f.css", "https://x.org/g"]
    wanted = {("a.html", link, "leaves the site") for link in links}
    wanted |= {("a.html", link, "no such file") for link in ("../outside.html", "c.html")}
    wanted |= {("a.html", link, "no such anchor") for link in ("sub/b.html#there", "#nowhere")}
    wanted.add(("_static/a.css", "https://x.org/h", "leaves the site"))
    assert problems_of(tmp_path, GOOD + BAD, '@font-face { src: url("https://x.org/h") }') == wanted
