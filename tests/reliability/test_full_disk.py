"""A disk that is really full, a small tmpfs, under everything that writes."""

import os

import numpy as np
import pytest

from bert_tools.tune.study import open_journal
from full_disk import COMMANDS, MISTAKE, PAGE, Inputs, disk, files_of, make_inputs, sweep
from mlperf_bert.data.shards import Shard
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.prepare.build import write_shard
from mlperf_bert.run.mlperf_log import MlperfLog
from support import make_tiny_inputs, mlperf_records

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@needs_root
def test_a_shard_of_any_part_of_which_there_is_no_room_for(synthetic_data, tmp_path):
    """libhdf5 itself ends the process where its last write fails."""
    shard, finished = Shard(synthetic_data / "eval/shards/eval.hdf5"), []
    arrays, settings = shard.arrays(), shard.sidecar.settings
    most = shard.path.stat().st_size + 8 * PAGE
    for free in range(0, most, PAGE):
        with disk(tmp_path / "disk", free) as at:
            path = at / "shard.hdf5"
            try:
                write_shard(path, arrays, source_name="x", source_sha256="0", settings=settings)
            except DataError as error:
                assert "No space left on device" in str(error)
                assert list(files_of(at)) in ([], ["shard.hdf5"])  # without its sidecar: not there
            else:
                assert np.array_equal(Shard(path).arrays().input_ids, arrays.input_ids)
                finished.append(free)
    assert 0 < len(finished) < 10


@needs_root
def test_an_mlperf_log_ends_with_a_whole_record(tmp_path):
    with disk(tmp_path / "disk", 3 * PAGE) as at:
        log = MlperfLog(at / "result_0.txt")
        with pytest.raises(ConfigError, match="No space left on device"):
            for number in range(1000):
                log.eval_start(number)
        (at / ".filler").unlink()
        log.close()  # with room again: what could not be written is not made up for
        numbers = [each["metadata"]["epoch_num"] for each in mlperf_records(at / "result_0.txt")]
        assert numbers == list(range(len(numbers))) and len(numbers) > 10


@needs_root
def test_a_journal_of_tune_goes_on_after_a_full_disk(tmp_path):
    optuna = pytest.importorskip("optuna")
    with disk(tmp_path / "disk", 3 * PAGE) as at:
        path = at / "journal.log"
        study = optuna.create_study(storage=open_journal(path), study_name="trials")
        with pytest.raises(OSError, match="No space left on device"):
            for number in range(1000):
                study.set_user_attr("fact", "x" * number)
        (at / ".filler").unlink()
        for fact in ("last", "last but not least"):
            study = optuna.load_study(storage=open_journal(path), study_name="trials")
            study.set_user_attr("fact", fact)
        again = optuna.load_study(storage=open_journal(path), study_name="trials")
        assert again.user_attrs["fact"] == fact


@pytest.mark.real
@needs_root
def test_prepare_ends_in_one_line(tmp_path):
    make_tiny_inputs(tmp_path)
    (good, *full) = sweep("prepare --text", Inputs(tmp_path), tmp_path, 4)
    assert (good[1].status, good[1].faults) == (0, ())
    assert [(ended.status, ended.faults) for _, ended in full] == [(MISTAKE, ())] * len(full)
    assert all("No space left on device" in ended.printed for _, ended in full)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.longest
@pytest.mark.timeout(3600)
@needs_root
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_writes(name, inputs, tmp_path):
    (good, *full) = sweep(name, inputs, tmp_path, 12)
    assert good[1].faults == ()
    assert {free: ended.faults for free, ended in full if ended.faults} == {}
    assert full[0][1].status == MISTAKE
