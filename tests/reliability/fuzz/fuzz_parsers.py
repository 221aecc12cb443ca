"""The parsers that are fuzzed: for each a valid world, what of it is hostile, and how it is read.

A new reader joins with one entry of PARSERS.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fuzz_examples import EXAMPLE_PARSERS, SHARD, mutate_hdf5, parse_structure
from fuzz_mutations import mutate_bytes, mutate_json, mutate_toml
from fuzz_run_files import RUN_PARSERS
from fuzz_tensorflow import TENSORFLOW_PARSERS
from fuzz_text import TEXT_PARSERS
from fuzz_tools import TOOLS_PARSERS
from fuzz_weights import WEIGHTS_PARSERS
from fuzz_world import Parser, files

from bert_tools.package.system_description import FIELDS, read_description
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
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from shard_sets import write_set
from support import TINY_CONFIG
from verify_cases import write_signed

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "caf\u00e9", "##s", "\u4e00")
MANIFEST = "index/dataset.json"


def make_set(directory: Path) -> None:
    """A prepared set of two shards, without text."""
    write_set(directory, [(5, "<u2"), (3, "<u4")], seed=7)


def repair_manifest(directory: Path, _target: str) -> None:
    """Give the manifest the digest of what it says now."""
    try:
        write_signed(directory / MANIFEST, json.loads((directory / MANIFEST).read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return


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
    files({"tiny.toml": TINY_CONFIG, MANIFEST: "{}"})(directory)
    settings = plan_settings(load_config(directory / "tiny.toml"))
    record = StageRecord(hashlib.sha256(b"{}").hexdigest(), StagedPart(0, 20, settings))
    (directory / "stage.json").write_bytes(record.to_json())


def parse_stage(directory: Path) -> object:
    """As training does, with the config that the stage was made for."""
    return check_stage(directory, load_config(directory / "tiny.toml"), 0)


def make_config(directory: Path) -> None:
    """A complete config, an override, and the config as JSON."""
    files({"tiny.toml": TINY_CONFIG})(directory)
    config = load_config(directory / "tiny.toml")
    made = {
        "config.toml": config_to_toml(config),
        "override.txt": 'mlperf.submission_org = "Acme"',
        "tables.json": write_json(config_to_tables(config)),
    }
    files(made)(directory)


def parse_config(directory: Path) -> object:
    """Parse a config; an accepted one is written, and read back equal."""
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


def parse_description(directory: Path) -> object:
    """Problems are returned, not raised: the first one is."""
    for problem in read_description(directory / "system.json", "system.json")[1]:
        raise problem
    return None


def _read_again(directory: Path, config: RunConfig) -> RunConfig:
    (directory / "again.toml").write_text(config_to_toml(config), encoding="utf-8")
    assert load_config(directory / "again.toml") == config
    return config


FIELD_VALUES = dict.fromkeys(FIELDS, "1") | {"division": "open", "status": "Preview"}
ARRAYS = ("index/lengths.u16", "index/masked_counts.u8", "index/order_by_length.u32")
PARSERS: Mapping[str, Parser] = {
    **EXAMPLE_PARSERS,
    "sidecar": Parser(
        make=make_set,
        targets={f"{SHARD}.json": mutate_json},
        parse=lambda directory: read_sidecar(directory / SHARD),
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
    "hdf5_child": Parser(
        make=make_set, targets={SHARD: mutate_hdf5}, parse=parse_structure, inputs=5000
    ),
    "system_description": Parser(
        make=files({"system.json": write_json(FIELD_VALUES)}),
        targets={"system.json": mutate_json},
        parse=parse_description,
    ),
    "vocabulary": Parser(
        make=files({"vocab.txt": "\n".join(WORDS) + "\n"}),
        targets={"vocab.txt": mutate_bytes},
        parse=lambda directory: load_vocabulary(directory / "vocab.txt"),
    ),
    "length_histogram": Parser(
        make=files({"lengths.csv": "# comment\nlength,count\n5,10\n128,3\n512,40\n"}),
        targets={"lengths.csv": mutate_bytes},
        parse=lambda directory: read_histogram(directory / "lengths.csv"),
    ),
    **RUN_PARSERS,
    **WEIGHTS_PARSERS,
    **TEXT_PARSERS,
    **TOOLS_PARSERS,
    **TENSORFLOW_PARSERS,
}
