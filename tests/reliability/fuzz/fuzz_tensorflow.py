"""TensorFlow's checkpoints as worlds to fuzz: its own small files, with tables written anew."""

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile

from fuzz_mutations import mutate_bytes
from fuzz_world import Parser, files

from bert_tools.convert.tensorflow_bundle import BundleTensor, damage_of, read_bundle
from bert_tools.convert.tensorflow_names import OBJECT_GRAPH, as_first_release
from bert_tools.convert.tensorflow_source import open_tensorflow
from bert_tools.convert.tensorflow_table import open_table
from mlperf_bert.common.untrusted import read_regular_file
from tensorflow_cases import OBJECTS, V2_SHARDS
from tensorflow_tables import (
    block_of,
    encoded,
    ended,
    entries_of,
    fields_of,
    handle,
    sealed,
    table,
    text_tensor,
)

INDEX = f"{V2_SHARDS.name}.index"
DATA = tuple(f"{V2_SHARDS.name}.data-{number:05d}-of-00002" for number in range(2))
TABLE = "table"
GRAPH = "graph"
_NUMBERS = (0, 1, 2, 7, 14, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62)
_NUMBERS += (2**63 - 1, 2**63, 2**64 - 1, 2**64 - 4)
_DEEPEST = 6  # messages in messages
_SEVERAL_BLOCKS = table([(b"key/%03d" % n, bytes([n]) * n) for n in range(60)], per_block=9)


def make_bundle(directory: Path) -> None:
    """A V2 checkpoint of two data files, with tensors of all kinds, some in parts."""
    shutil.copytree(V2_SHARDS.parent, directory, dirs_exist_ok=True)


def parse_bundle(directory: Path) -> object:
    """Every tensor, as a conversion reads them."""
    return [tensor.read() for tensor in open_tensorflow(directory / V2_SHARDS.name).values()]


def parse_table(directory: Path) -> object:
    path = directory / TABLE
    with damage_of(path):
        return list(open_table(path).items(2**22))


def make_graph(directory: Path) -> None:
    """The graph of objects of a checkpoint of TensorFlow 2, by itself."""
    graph = read_bundle(OBJECTS)[OBJECT_GRAPH]
    assert isinstance(graph, BundleTensor)
    (directory / GRAPH).write_bytes(graph.read_text())


def parse_graph(directory: Path) -> object:
    """Names of the tensors, with the graph as a text that has the right checksums."""
    path = directory / GRAPH
    with damage_of(path):
        graph = read_regular_file(path, 2**23)
    tensors = read_bundle(OBJECTS)
    return as_first_release(tensors | {OBJECT_GRAPH: text_tensor(directory / "text", graph)}, path)


def mutate_table(rng: Random, contents: bytes) -> bytes:
    """Change bytes, or entries, blocks or index, and write the table anew with right checksums."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, contents)
    entries = list(_entries(contents))
    if rng.random() < 0.7:
        for _ in range(rng.choice((1, 1, 2))):
            _mutate_entry(rng, entries)
        return table(entries, per_block=rng.choice((1, 3, 1000)))
    return _mutate_layout(rng, entries)


@cache
def _entries(contents: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Entries of a valid table: the world's."""
    with NamedTemporaryFile() as file:
        file.write(contents)
        file.flush()
        return tuple(entries_of(Path(file.name)))


def _mutate_entry(rng: Random, entries: list[tuple[bytes, bytes]]) -> None:
    number = rng.randrange(len(entries))
    key, value = entries[number]
    what = rng.randrange(10)
    if what <= 5:
        entries[number] = key, mutate_message(rng, value)
    elif what == 6:
        entries[number] = key, mutate_bytes(rng, value)
    elif what == 7:
        entries[number] = mutate_bytes(rng, key), value
    elif what == 8:
        entries[number] = key, rng.choice(entries)[1]
    elif rng.random() < 0.5 and len(entries) > 2:
        del entries[number]
    else:
        entries.insert(rng.randrange(len(entries)), entries[number])


def mutate_message(rng: Random, contents: bytes, depth: int = 0) -> bytes:
    """Change, remove, double or exchange fields of a message, or of one inside it."""
    try:
        fields = list(fields_of(contents))
    except ValueError:  # bytes of another kind
        fields = []
    if not fields or depth > _DEEPEST:
        return mutate_bytes(rng, contents)
    place = rng.randrange(len(fields))
    number, kind, value = fields[place]
    what = rng.randrange(8)
    if what == 0:
        del fields[place]
    elif what == 1:
        fields.extend([fields[place]] * rng.choice((1, 2, 50)))
    elif what == 2:
        fields[place] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 13, 2**29)), kind, value
    elif what == 3:
        fields.insert(0, fields.pop(place))
    elif kind == 2 and what < 7:
        fields[place] = number, kind, mutate_message(rng, value, depth + 1)
    elif kind == 2:
        fields[place] = number, kind, mutate_bytes(rng, value)
    elif kind == 0:
        fields[place] = number, kind, encoded(rng.choice(_NUMBERS))
    else:
        fields[place] = number, kind, mutate_bytes(rng, value)
    return b"".join(_field(*field) for field in fields)


def _field(number: int, kind: int, value: bytes) -> bytes:
    size = encoded(len(value)) if kind == 2 else b""
    return encoded(number << 3 | kind) + size + value


def _mutate_layout(rng: Random, entries: list[tuple[bytes, bytes]]) -> bytes:
    """Two blocks and their index, one of these three changed under a right checksum."""
    half = len(entries) // 2
    contents = [block_of(entries[:half]), block_of(entries[half:])]
    what = rng.randrange(4)
    if what < 2:
        contents[what] = mutate_bytes(rng, contents[what])
    blocks = [sealed(each, 0) for each in contents]
    if what == 2:
        blocks[0] = sealed(mutate_bytes(rng, contents[0]), rng.choice((0, 1, 2)))
    handles = [handle(0, blocks[0]), handle(len(blocks[0]), blocks[1])]
    index = [(entries[half - 1][0], handles[0]), (entries[-1][0], handles[1])]
    if what == 3:
        place = rng.randrange(2)
        key, where = index[place]
        index[place] = rng.choice(((key, mutate_bytes(rng, where)), (key[:1], where)))
        if rng.random() < 0.3:
            numbers = (encoded(rng.choice(_NUMBERS)), encoded(rng.choice(_NUMBERS)))
            index[place] = key, b"".join(numbers)
    return ended(b"".join(blocks), index)


TENSORFLOW_PARSERS: Mapping[str, Parser] = {
    "tensorflow_table": Parser(
        make=files({TABLE: _SEVERAL_BLOCKS}), targets={TABLE: mutate_table}, parse=parse_table
    ),
    "tensorflow_bundle": Parser(
        make=make_bundle,
        targets={INDEX: mutate_table, **dict.fromkeys(DATA, mutate_bytes)},
        parse=parse_bundle,
    ),
    "tensorflow_graph": Parser(make=make_graph, targets={GRAPH: mutate_message}, parse=parse_graph),
}
