"""A benchmark's numbers as a table that the figures read, with where they come from."""

from pathlib import Path

from benchmarks.tables import write_numbers
from nereus.report.table import read_table

NUMBERS = (
    ("event", "64 GPUs", "median_seconds", 1e-3),
    ("event", "1024 GPUs", "median_seconds", 2e-3),
    ("price", "64 GPUs", "n", 3),
)


def test_numbers_are_read_back_with_their_source(tmp_path: Path) -> None:
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        write_numbers(path, "overhead", NUMBERS, command="python -m it", measured=True)
    table, source = read_table(paths[0])
    assert table.select("run_id", "variant", "metric", "value").rows() == [
        (f"overhead-{part}", variant, metric, float(value)) for part, variant, metric, value in NUMBERS
    ]
    assert set(source.runs) == set(table["run_id"]) == {"overhead-event", "overhead-price"}
    assert (source.command, source.measured, source.sample) == ("python -m it", True, False)
    assert read_table(paths[1])[0].equals(table)
