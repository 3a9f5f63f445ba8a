"""What translations of LibreOffice's help keep."""

from tools.libreoffice import kept


def test_only_what_the_reference_keeps_too_is_counted() -> None:
    pairs = [
        ("Enter <?> or <?>.", "Geben Sie <?> oder <?> ein."),
        ("Enter <?>.", "Geben Sie <?> ein."),
        ("Press F5, 2.5 times.", "Drücken Sie F5, 2,5 Mal."),  # the reference writes 2,5
        ("Press F5, 3 times.", "Drücken Sie F5, 3 Mal."),
    ]
    outputs = ["Geben Sie <?> ein.", "Geben Sie <?> ein.", "Drücken Sie F5.", "F6, 3 Mal."]
    found = kept(pairs, outputs)
    assert found["placeholders"] == {"lines": 2, "kept": 1, "share": 0.5}
    assert found["numbers"] == {"lines": 1, "kept": 0, "share": 0.0}  # F6 holds a 6
    assert found["function keys"] == {"lines": 2, "kept": 1, "share": 0.5}
    assert kept([("a", "b")], ["b"])["numbers"]["share"] is None
