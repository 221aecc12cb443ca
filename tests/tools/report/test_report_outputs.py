"""`mlperf_bert report`: the files it writes, what it prints, and one line for every mistake."""

import pytest

from report_pages import checked
from run_cases import records_of, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", records_of(), ended="success")


def test_the_page_of_a_run_is_in_its_directory(run, told):
    said = told("report", "page", run).splitlines()
    assert "target reached" in checked((run / "report.html").read_text("utf-8")).words
    assert said[0] == f"{run}/run_0: target reached"
    assert said[1].startswith("open this page (") and said[1].endswith(f": {run}/report.html")


def test_of_several_runs_it_is_below_runs_or_where_asked_for(run, tmp_path, monkeypatch, told):
    other = write_run(tmp_path / "other", records_of())
    monkeypatch.chdir(tmp_path)
    told("report", "page", run, other)
    assert "other" in checked((tmp_path / "runs/report.html").read_text("utf-8")).words
    told("report", "page", run, "--out", "new/folder/other.html")
    assert not (run / "report.html").exists() and (tmp_path / "new/folder/other.html").exists()


def test_a_place_prints_as_one_line(tmp_path, told):
    run = write_run(tmp_path / "a\x1b[31m\nb", records_of())
    lines = told("report", "page", run).split("\n")
    assert len(lines) == 3 and all(line.isprintable() for line in lines)


def test_tensorboard_reads_what_is_written(run, tmp_path, told):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = tmp_path / "scalars"
    said = told("report", "tensorboard", run, "--out", directory)
    scalars = "wrote 48 scalars; to show them: tensorboard"  # 4 records of 12 numbers
    assert f"{scalars} --logdir {directory}" in said
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("mlm_accuracy")]
    assert found == [(each["step"], pytest.approx(each["mlm_accuracy"])) for each in records_of()]
    assert {each.value for each in events.Scalars("step_ms")} == {20.0}
    again = told("report", "tensorboard", run, "--out", directory, status=2)
    assert "already contains an event file" in again


REFUSED = {
    "report page run --out .": "--out: . is a directory; pass a file, such as report.html",
    "report page run --out run/run_0/config.toml/x.html": "config.toml: File exists; use ",
    "report page missing": "missing: No such file or directory",
    "report tensorboard run --out run/run_0/config.toml": "run/run_0/config.toml: ",
    "report tensorboard two --out scalars": "has 2 runs; pass one run, such as ",
    "watch missing --once": "no such directory",
    "watch run/run_0/config.toml --once": "pass a run directory",
    "watch a\x1b[31m --once": "a\\x1b[31m",
}


def test_what_cannot_be_is_one_line(run, tmp_path, monkeypatch, told):
    monkeypatch.chdir(tmp_path)
    for index in (0, 1):
        write_run(tmp_path / "two", records_of(), index=index)
    for words, line in REFUSED.items():
        assert line in told(*words.split(" "), status=2)
        assert {path.name for path in tmp_path.iterdir()} == {"run", "two"}
