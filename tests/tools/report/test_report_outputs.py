"""`mlperf_bert report`: the files it writes, what it prints, and one line for every mistake."""

import json
import sys
import warnings
from pathlib import Path

import pytest
from run_cases import BATCH_16K, PUBLISHED, Told, log_of, record, records_16k, write_run

from bert_tools.report.chart import Chart, Series
from bert_tools.report.pictures import chart_picture
from report_pages import checked

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED), ended="success")


def test_the_page_of_a_run_is_in_its_directory(run: Path, told: Told) -> None:
    said = told("report", "page", run).splitlines()
    assert "on track" in checked((run / "report.html").read_text("utf-8")).words
    assert said[0] == f"{run}/run_0: target reached, on track"
    assert "best accuracy 0.7200, samples to target 2,932,736" in said[1]
    assert said[2].startswith("page, ") and said[2].endswith(f": {run}/report.html")


def test_of_several_runs_it_is_below_runs_or_where_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    log = tmp_path / "theirs.txt"
    log.write_text(log_of(PUBLISHED, 16_384), encoding="ascii")
    monkeypatch.chdir(tmp_path)
    told("report", "page", run, log)
    assert "theirs.txt" in checked((tmp_path / "runs/report.html").read_text("utf-8")).words
    told("report", "page", log, "--out", "other.html")
    assert not (run / "report.html").exists() and (tmp_path / "other.html").exists()


def test_pictures_of_all_charts(run: Path, tmp_path: Path, told: Told) -> None:
    pictures = tmp_path / "new" / "pictures"
    told("report", "pictures", run, "--out", pictures)
    names = {"accuracy", "loss", "samples_per_s", "step_ms", "learning_rate"}
    assert {path.stem for path in pictures.iterdir()} == names
    assert all(path.read_bytes().startswith(PNG) for path in pictures.iterdir())


def picture(*names: str) -> bytes:
    """A picture with a curve for each name; a warning, such as of a full legend, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        points = ((1.0, 2.0), (2.0, 3.0))
        series = [Series(run=run, label=name, points=points) for run, name in enumerate(names)]
        return chart_picture(Chart(key="loss", title="Loss", series=tuple(series)))


def test_any_name_is_in_the_legend_of_a_picture() -> None:
    # What begins with _ matplotlib likes to leave out; what is between $ it takes for a formula.
    assert picture("_a", "b") != picture("_bcd", "b")
    for name in ("\u6a21\u578b", r"$\frac{$"):  # the first is not in its font
        assert picture(name, "b").startswith(PNG)

    def size(num_runs: int) -> tuple[int, int]:
        png = picture(*(f"{'x' * 250}{run}" for run in range(num_runs)))
        return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")

    few, many = size(2), size(64)  # 32 runs, of step time and wait
    assert many[0] == few[0] and many[1] > 2 * few[1]  # it grows with its legend


def test_a_place_prints_as_one_line(tmp_path: Path, told: Told) -> None:
    run = write_run(tmp_path / "a\x1b[31m\nb", BATCH_16K, records_16k(PUBLISHED))
    lines = told("report", "page", run).split("\n")
    assert len(lines) == 4 and all(line.isprintable() for line in lines)


def test_json_has_the_numbers_and_writes_nothing(run: Path, tmp_path: Path, told: Told) -> None:
    slow = records_16k(PUBLISHED, samples_per_s=500.0)
    other = write_run(tmp_path / "b", BATCH_16K, slow, overrides=["clip.max_norm=2.0"])
    found = json.loads(told("report", "page", run, other, "--json"))
    assert found["schema_version"] == 1
    assert found["differences"] == [{"name": "clip.max_norm", "values": ["1.0", "2.0"]}]
    first, second = found["runs"]
    assert (first["state"], first["verdict"]) == ("target reached", "on track")
    assert (first["samples_per_s"], second["samples_per_s"]) == (1000.0, 500.0)
    assert first["samples_to_target"] == 179 * 16_384 and first["skipped_steps"] == 0
    assert first["memory_gib"] is None and first["time_to_train_s"] is None
    assert [each["accuracy"] for each in first["evaluations"]] == [each for _, each in PUBLISHED]
    assert not (run / "report.html").exists()
    page = tmp_path / "page.html"  # written all the same where it is asked for
    assert (
        json.loads(told("report", "page", run, "--json", "--out", page))["runs"][0]["label"]
        == "run"
    )
    assert page.stat().st_size > 10_000


def test_tensorboard_reads_what_is_written(run: Path, tmp_path: Path, told: Told) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = tmp_path / "scalars"
    said = told("report", "tensorboard", run, "--out", directory)
    # 5 records of loss, accuracy, learning rate, rate, skipped steps, step and wait time
    assert f"35 scalars, for tensorboard --logdir {directory}" in said
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("mlm_accuracy")]
    assert found == [(step, pytest.approx(accuracy)) for step, accuracy in PUBLISHED]
    assert {each.value for each in events.Scalars("step_ms")} == {100.0}
    again = told("report", "tensorboard", run, "--out", directory, status=2)
    assert "holds an event file already" in again


def test_each_of_several_runs_has_scalars_of_its_own_or_none_has(
    tmp_path: Path, told: Told
) -> None:
    pytest.importorskip("tensorboard")
    a, b, c = (
        write_run(tmp_path / name, BATCH_16K, records_16k(PUBLISHED))
        for name in ("a b", "a_b", "c")
    )
    scalars = tmp_path / "scalars"
    (scalars / "c").mkdir(parents=True)
    (scalars / "c" / "events.out.tfevents.1").touch()
    assert "c: holds an event file already" in told(
        "report", "tensorboard", a, c, "--out", scalars, status=2
    )
    assert [path.name for path in scalars.iterdir()] == ["c"]
    said = told("report", "tensorboard", a, "--out", f"{tmp_path}/\udcff", status=2)
    assert "is not UTF-8, which TensorBoard cannot write to" in said
    told("report", "tensorboard", a, b, "--out", scalars)  # whose names are alike
    assert [path.name for path in sorted(scalars.iterdir())] == ["1_a_b", "2_a_b", "c"]
    assert len(list(scalars.glob("*_a_b/events.out.tfevents.*"))) == 2


EXTRAS = {
    "tensorboard": (
        ["tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2"],
        "tensorboard: is not installed; run in the checkout: tools/venv.sh tensorboard\n",
    ),
    "pictures": (["matplotlib.figure"], "matplotlib: is not installed, and draws the picture; "),
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_without_an_extra_a_line_names_it_and_nothing_is_written(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    modules, line = EXTRAS[kind]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    said = told("report", kind, run, "--out", tmp_path / "more", status=2)
    assert said.startswith(f"mlperf_bert: error: {line}")
    assert not (tmp_path / "more").exists() and not (run / "report.html").exists()


CANNOT_BE = {
    "page run --out .": "--out: . is a directory; name a file, as report.html",
    "page run --out missing/x.html": "missing/x.html: No such file or directory",
    "pictures run --out run/result_0.txt": "run/result_0.txt: File exists",
    "tensorboard run --out run/result_0.txt": "run/result_0.txt: ",
}


def test_options_that_cannot_be(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, line in CANNOT_BE.items():
        assert line in told("report", *options.split(), status=2)
        assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_file_that_is_wrong_is_refused_in_a_line(run: Path, told: Told) -> None:
    for name, contents, line in (
        ("environment.json", '{"schema_version": 1, "device": ["cpu"]}', "holds a list, no text"),
        ("environment.json", '{"schema_version": 2}', "is 2, this program reads 1"),
        ("environment.json", "{", "is not valid JSON"),
        ("config.toml", "a = ", "is not TOML"),
    ):
        path = run / "run_0" / name
        before = path.read_text("utf-8") if path.exists() else None
        path.write_text(contents, encoding="utf-8")
        error = told("report", "page", run, status=2)
        assert name in error and line in error and not (run / "report.html").exists()
        path.unlink() if before is None else path.write_text(before, encoding="utf-8")


def test_more_runs_than_colours_are_told_apart_by_dashes(tmp_path: Path, told: Told) -> None:
    runs = [
        write_run(tmp_path / f"n{n}", BATCH_16K, [record(1, 16_384, 0.1 + n / 100)])
        for n in range(10)
    ]
    page_path = tmp_path / "page.html"
    told("report", "page", *runs, "--out", page_path)
    values = checked(page_path.read_text("utf-8")).values[0]["series"]
    drawn = [each["class"] for each in values if each["label"].startswith("n")]
    assert len(set(drawn)) == 10
