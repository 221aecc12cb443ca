"""The parsers that are fuzzed: for each a valid world, what of it is hostile, and how it is read.

A new reader joins with one entry of PARSERS.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fuzz_checkpoint import (
    STEP,
    make_checkpoint,
    mutate_tensors,
    parse_checkpoint,
    repair_checkpoint,
)
from fuzz_examples import EXAMPLE_PARSERS
from fuzz_hdf5 import SHARD, mutate_hdf5, parse_hdf5
from fuzz_huggingface import HUGGINGFACE_PARSERS
from fuzz_mutations import mutate_bytes, mutate_json, mutate_lines, mutate_toml
from fuzz_own_text import OWN_TEXT_PARSERS
from fuzz_parser import Parser
from fuzz_report import REPORT_PARSERS
from fuzz_results import RESULTS_PARSERS
from fuzz_run_files import (
    CONFIG,
    LOG,
    METRICS,
    OUTCOME,
    RUN,
    STDOUT,
    make_log,
    make_metrics,
    make_outcome,
    make_run,
    make_watched_run,
    parse_foreign_log,
    parse_run,
    parse_watched_run,
)
from fuzz_squad import SQUAD_PARSERS
from fuzz_tensorflow import TENSORFLOW_PARSERS
from fuzz_tokenizer import TOKENIZER_PARSERS
from fuzz_tune import TUNE_PARSERS

from bert_tools.common.log_reader import TOKEN, read_log
from bert_tools.package.plausibility import check_course
from bert_tools.package.run_facts import read_facts
from bert_tools.package.system_description import FIELDS, read_description
from bert_tools.report.run_files import read_metrics
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.config.files import (
    config_from_tables,
    config_to_tables,
    config_to_toml,
    load_config,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import (
    OWN_DIGEST,
    LengthIndex,
    Manifest,
    StagedPart,
    StageRecord,
    read_sidecar,
    sidecar_path,
)
from mlperf_bert.data.length_histogram import read_histogram
from mlperf_bert.data.set_checks import check_stage, plan_settings
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.run.outcome import read_outcome
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from support import TINY_CONFIG

MANIFEST = "index/dataset.json"


def make_set(directory: Path) -> None:
    """A prepared set of two shards, without text."""
    from shard_sets import write_set

    write_set(directory, [(5, "<u2"), (3, "<u4")], seed=7)


def repair_manifest(directory: Path, _target: str) -> None:
    """Give the manifest the digest of what it says now."""
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_bytes())
        values.pop(OWN_DIGEST)
        digest = hashlib.sha256(write_json(values)).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    path.write_bytes(write_json({**values, OWN_DIGEST: digest}))


def repair_sidecar(directory: Path, _target: str) -> None:
    """Let the sidecar say the shard's size as it is now."""
    path = sidecar_path(directory / SHARD)
    size = (directory / SHARD).stat().st_size
    path.write_bytes(write_json(json.loads(path.read_bytes()) | {"shard_bytes": size}))


def parse_samples(directory: Path) -> object:
    """All samples of a set, by the compiled code that training reads with."""
    reader = SampleReader(directory, Manifest.load(directory))
    everything = np.arange(reader.manifest.num_samples)
    return Gatherer(reader).batch(everything, mlm_denominator=1.0, nsp_denominator=1.0)


def make_stage(directory: Path) -> None:
    """A manifest, and the record of a partial stage of it."""
    config = load_config(_write(directory / "tiny.toml", TINY_CONFIG))
    _write(directory / MANIFEST, "{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    record = StageRecord(digest, StagedPart(0, 20, plan_settings(config)))
    (directory / "stage.json").write_bytes(record.to_json())


def parse_stage(directory: Path) -> object:
    """As training does, with the config that the stage was made for."""
    return check_stage(directory, load_config(directory / "tiny.toml"), 0)


def make_config(directory: Path) -> None:
    """A complete config, an override, and the config as JSON."""
    config = load_config(_write(directory / "tiny.toml", TINY_CONFIG))
    _write(directory / "config.toml", config_to_toml(config))
    _write(directory / "override.txt", 'mlperf.submission_org = "Acme"')
    (directory / "tables.json").write_bytes(write_json(config_to_tables(config)))


def parse_config(directory: Path) -> object:
    """What is accepted is written, and read as the same."""
    return _read_again(directory, load_config(directory / "config.toml"))


def parse_override(directory: Path) -> object:
    """An argument of --set, as the operating system hands it over."""
    if not (directory / "override.txt").is_file():
        raise ConfigError("--set", "is no file here", "write section.field=value")
    argument = (directory / "override.txt").read_bytes().decode("utf-8", "surrogateescape")
    return _read_again(directory, load_config(directory / "tiny.toml", [argument]))


def parse_tables(directory: Path) -> object:
    """A config out of JSON, as checkpoints keep it."""
    path = directory / "tables.json"
    record = read_record(path, missing="is missing", remedy="give another")
    return config_from_tables(record.values, str(path))


def make_description(directory: Path) -> None:
    """A system description with every field."""
    fields = dict.fromkeys(FIELDS, "1") | {"division": "open", "status": "Preview"}
    (directory / "system.json").write_bytes(write_json(fields))


def parse_description(directory: Path) -> object:
    """Problems are returned, not raised: the first one is."""
    for problem in read_description(directory / "system.json", "system.json")[1]:
        raise problem
    return None


def make_words(directory: Path) -> None:
    """A vocabulary of a few words."""
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "caf\u00e9", "##s", "\u4e00")
    _write(directory / "vocab.txt", "\n".join(words) + "\n")


def make_histogram(directory: Path) -> None:
    """A few lengths and their counts."""
    _write(directory / "lengths.csv", "# comment\nlength,count\n5,10\n128,3\n512,40\n")


def _read_again(directory: Path, config: RunConfig) -> RunConfig:
    again = _write(directory / "again.toml", config_to_toml(config))
    assert load_config(again) == config
    return config


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


ARRAYS = ("index/lengths.u16", "index/masked_counts.u8", "index/order_by_length.u32")
PARSERS: Mapping[str, Parser] = {
    **EXAMPLE_PARSERS,
    "sidecar": Parser(
        make=make_set,
        targets={"shards/part-0.hdf5.json": mutate_json},
        parse=lambda directory: read_sidecar(directory / "shards/part-0.hdf5"),
    ),
    "manifest": Parser(
        make=make_set, targets={MANIFEST: mutate_json}, parse=Manifest.load, repair=repair_manifest
    ),
    "index": Parser(
        make=make_set,
        targets={MANIFEST: mutate_json, **dict.fromkeys(ARRAYS, mutate_bytes)},
        parse=LengthIndex.open,
        repair=repair_manifest,
    ),
    "samples": Parser(
        make=make_set, targets={SHARD: mutate_bytes}, parse=parse_samples, repair=repair_sidecar
    ),
    "stage_record": Parser(
        make=make_stage,
        targets={"stage.json": mutate_json},
        optional=("stage.json",),
        parse=parse_stage,
    ),
    "config": Parser(
        make=make_config,
        targets={"config.toml": mutate_toml},
        parse=parse_config,
    ),
    "config_override": Parser(
        make=make_config, targets={"override.txt": mutate_toml}, parse=parse_override
    ),
    "config_tables": Parser(
        make=make_config, targets={"tables.json": mutate_json}, parse=parse_tables
    ),
    "mlperf_log": Parser(
        make=make_log,
        targets={LOG: mutate_lines(TOKEN)},
        parse=lambda directory: list(check_course(read_facts(read_log(directory / LOG, LOG)))),
    ),
    "foreign_log": Parser(
        make=make_log, targets={LOG: mutate_lines(TOKEN)}, parse=parse_foreign_log
    ),
    "outcome": Parser(
        make=make_outcome,
        targets={OUTCOME: mutate_json},
        parse=lambda directory: read_outcome(directory / OUTCOME),
    ),
    "run_directory": Parser(
        make=make_run,
        targets={
            f"{RUN}/{CONFIG}": mutate_toml,
            f"{RUN}/{METRICS}": mutate_lines(""),
            f"{RUN}/{OUTCOME}": mutate_json,
            LOG: mutate_lines(TOKEN),
        },
        optional=(f"{RUN}/{OUTCOME}", LOG),
        parse=parse_run,
    ),
    "watched_run": Parser(
        make=make_watched_run,
        targets={
            f"{RUN}/{CONFIG}": mutate_toml,
            f"{RUN}/{METRICS}": mutate_lines(""),
            f"{RUN}/{OUTCOME}": mutate_json,
            f"{RUN}/{STDOUT}": mutate_bytes,
        },
        optional=(f"{RUN}/{CONFIG}", f"{RUN}/{METRICS}", f"{RUN}/{OUTCOME}", f"{RUN}/{STDOUT}"),
        parse=parse_watched_run,
    ),
    "metrics": Parser(
        make=make_metrics,
        targets={METRICS: mutate_lines("")},
        parse=lambda directory: read_metrics(directory / METRICS),
    ),
    **REPORT_PARSERS,
    "checkpoint": Parser(
        make=make_checkpoint,
        targets={
            "checkpoints/LATEST": mutate_bytes,
            f"{STEP}/manifest.json": mutate_json,
            f"{STEP}/state.json": mutate_json,
            f"{STEP}/model.safetensors": mutate_tensors,
            f"{STEP}/optimizer/rank_00000.safetensors": mutate_tensors,
            f"{STEP}/rank_states.safetensors": mutate_tensors,
        },
        parse=parse_checkpoint,
        repair=repair_checkpoint,
    ),
    **HUGGINGFACE_PARSERS,
    "hdf5_child": Parser(
        make=make_set, targets={SHARD: mutate_hdf5}, parse=parse_hdf5, inputs=5000
    ),
    **OWN_TEXT_PARSERS,
    **RESULTS_PARSERS,
    **SQUAD_PARSERS,
    **TENSORFLOW_PARSERS,
    **TOKENIZER_PARSERS,
    **TUNE_PARSERS,
    "system_description": Parser(
        make=make_description, targets={"system.json": mutate_json}, parse=parse_description
    ),
    "vocabulary": Parser(
        make=make_words,
        targets={"vocab.txt": mutate_bytes},
        parse=lambda directory: load_vocabulary(directory / "vocab.txt"),
    ),
    "length_histogram": Parser(
        make=make_histogram,
        targets={"lengths.csv": mutate_bytes},
        parse=lambda directory: read_histogram(directory / "lengths.csv"),
    ),
}
