"""The share of placeholders that translations keep."""

from tools.libreoffice import PLACEHOLDER, kept_placeholders


def test_placeholders_are_found() -> None:
    text = (
        "Type <?> in {Installation}/python: $time %PRODUCTNAME [:digit:] A1 B2:B7, not A, 5% {a b}"
    )
    wanted = ["<?>", "{Installation}", "$time", "%PRODUCTNAME", "[:digit:]", "A1", "B2:B7"]
    assert PLACEHOLDER.findall(text) == wanted


def test_only_those_of_source_and_reference_are_wanted() -> None:
    found = kept_placeholders(
        ["<?> in <?>", "$100,000", "cell A1"],
        ["<?> in <?> <?>", "100.000 €", "Zelle A2"],
        ["<?> in <?>", "100.000 €", "Zelle A1"],
    )
    assert found == {"placeholders": 3, "placeholders_kept": 2 / 3}
