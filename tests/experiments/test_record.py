"""run.json and provenance.json: what is not exactly a record is refused with its place."""

import json
from pathlib import Path

import pytest

from nereus.errors import JournalError
from nereus.experiment import Run
from nereus.report.record import provenance_of, read_provenance, read_run, write_record

RUN = Run(experiment="e", variant="v")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "1", "expected int @ $.seed"),
        ("seed", True, "expected int @ $.seed"),
        ("sede", 1, "extra fields found (sede)"),
        ("system", "openrhlf", "$.system"),
        ("changes", [{"step": 2, "plan": {"actor_train": {"tpp": 1}}}], "$.changes[0].plan.actor_train"),
    ],
)
def test_a_wrong_record(key: str, value: object, message: str, tmp_path: Path) -> None:
    write_record(tmp_path, RUN, provenance_of("x"))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(JournalError) as caught:
        read_run(tmp_path)
    assert str(caught.value).startswith(f"{path}: expected a Run: ")
    assert message in str(caught.value)


def test_no_record_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"provenance\.json: cannot be read: No such file"):
        read_provenance(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(JournalError, match=r"run\.json: expected a Run"):
        read_run(tmp_path)
    with pytest.raises(JournalError, match="cannot be written"):
        write_record(tmp_path / "nowhere", RUN, provenance_of("x"))
