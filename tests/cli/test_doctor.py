"""The doctor: what is missing is said once, with what to do."""

from nereus.cli.doctor import Finding, findings_text


def test_what_is_missing_is_said() -> None:
    text = findings_text((Finding(name="ray", found="-", missing="install ray"), Finding(name="torch", found="2.13")))
    assert text == "ray    -\ntorch  2.13\n\nmissing: ray: install ray\n"


def test_nothing_missing() -> None:
    assert findings_text((Finding(name="ray", found="2.55"),)).endswith("\nnothing is missing\n")
