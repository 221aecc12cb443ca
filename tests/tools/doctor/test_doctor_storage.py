"""Disk, data and packages: from given facts, and from real files, to findings."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bert_tools.doctor import packages, storage
from bert_tools.doctor.storage import ReadRate
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.network_test.findings import Options, examined
from support import REPOSITORY

RATE = ReadRate(
    where=Path("/data"), source="shards", file_system="ext4", bytes_read=2**28, seconds=0.5
)
MOUNTS = """overlay / overlay rw 0 0
server:/x /data\\040sets nfs4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
"""
TORCH = packages.NEEDED[0]


def test_a_fast_disk_is_good_and_a_slow_one_is_staged() -> None:
    assert storage.judge_read(RATE).status == "ok"
    slow = storage.judge_read(replace(RATE, seconds=20.0))
    assert slow.status == "warn"
    assert "13 MB/s from /data (ext4" in slow.found
    assert "stage-data" in slow.remedy
    assert storage.judge_read(None).status == "warn"
    memory = storage.judge_read(replace(RATE, file_system="tmpfs", seconds=20.0))
    assert memory.status == "ok" and "is memory" in memory.found


@pytest.mark.parametrize(("free", "status"), [(2**20, "fail"), (5 * 2**30, "warn"), (2**40, "ok")])
def test_free_space(free: int, status: str) -> None:
    assert storage.judge_free(Path("/runs"), free).status == status


@pytest.mark.parametrize(
    ("path", "kind"), [("/data sets/train", "nfs4"), ("/dev/shm", "tmpfs"), ("/home", "overlay")]
)
def test_the_file_system_is_that_of_the_longest_mount_point(path: str, kind: str) -> None:
    assert storage.file_system_of(Path(path), MOUNTS) == kind


def test_reading_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_OWN_BYTES", 2**22)
    rate = storage.measure_read(tmp_path)
    assert rate is not None
    assert rate.bytes_read == 2**22
    assert rate.source == "a file of its own"
    assert list(tmp_path.iterdir()) == []


def test_large_shards_are_read_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ENOUGH_BYTES", 1000)
    shard = tmp_path / "train/shards/part.hdf5"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"x" * 5000)
    rate = storage.measure_read(tmp_path)
    assert rate is not None
    assert (rate.source, rate.bytes_read) == ("shards", 5000)
    assert storage.measure_read(tmp_path / "nothing") is None


def test_data_are_verified_and_held_against_the_config(
    synthetic_data: Path, tiny_config: Path
) -> None:
    (without,) = storage.check_data(Options())
    assert without.status == "warn"
    (verified,) = storage.check_data(Options(data=synthetic_data))
    assert verified.status == "ok"
    (fits,) = storage.check_data(Options(data=synthetic_data, config=load_config(tiny_config)))
    assert fits.status == "ok"
    assert "fits the config" in fits.found
    short = load_config(tiny_config, ["data.max_seq_length=16"])
    (too_long,) = examined(
        "data", lambda: storage.check_data(Options(data=synthetic_data, config=short)), 60
    )
    assert too_long.status == "fail"
    assert "data.max_seq_length" in too_long.found


def test_damaged_data_fail_with_the_first_problem(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (finding,) = storage.check_data(Options(data=tmp_path))
    assert finding.status == "fail"
    assert "problems, the first: " in finding.found
    assert "mlperf_bert verify" in finding.remedy


@pytest.mark.parametrize(
    ("version", "status", "remedy"),
    [
        ("2.11.0+cu130", "ok", ""),
        ("2.10.1", "warn", "torch>=2.11,<2.14; run in the checkout: tools/venv.sh"),
        ("2.14.0", "warn", "torch>=2.11,<2.14"),
        (None, "fail", "run in the checkout: tools/venv.sh"),
    ],
)
def test_what_is_needed_is_there_in_a_version_that_was_tried(
    version: str | None, status: str, remedy: str
) -> None:
    finding = packages.judge(TORCH, version)
    assert finding.status == status
    assert bool(finding.remedy) == bool(remedy) and remedy in finding.remedy


def test_what_training_can_do_without_says_what_its_lack_costs() -> None:
    apex = packages.judge(packages.OPTIONAL[0], None)
    assert apex.status == "warn"
    assert "optim.implementation 'apex'" in apex.found
    assert apex.remedy == "if you need it: an image that has NVIDIA's apex"
    assert packages.judge_mpi(None, "mpi4py not found").status == "warn"
    assert packages.judge_mpi("MPICH", "").status == "ok"


def test_what_is_needed_is_what_pyproject_requires() -> None:
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    listed = {
        package.name + ">=" + ".".join(map(str, package.lowest)) for package in packages.NEEDED
    }
    assert listed == {text.partition(",")[0] for text in required["project"]["dependencies"]}


@pytest.mark.parametrize(
    ("rulesets", "status"), [(("4.1.0", "5.0.0"), "ok"), (("4.1.0",), "fail"), (None, "warn")]
)
def test_the_ruleset_is_known(rulesets: tuple[str, ...] | None, status: str) -> None:
    assert packages.judge_ruleset(rulesets).status == status


def test_a_package_that_is_not_there_has_no_version() -> None:
    nothing = packages.Package("no-such", "no_such.part", "nothing")
    assert packages.installed_version(nothing) is None
    assert packages.installed_version(TORCH)
