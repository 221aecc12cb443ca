"""Reader of Parquet files of own text: each row's text becomes one line of JSON.

It starts no threads and holds one page and one batch of rows, whatever the size of the row groups.
"""

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

_ENCRYPTED = b"PARE"  # first bytes of a file whose footer is encrypted
_ROWS = 16
_BUFFER_BYTES = 2**20
_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def read_lines(column: str, path: str) -> Iterator[bytes]:
    """Yield lines {column: text}, UTF-8, in the order of rows; a null stays null.

    Bytes that are not UTF-8 become U+FFFD. Raises ValueError if no column of strings has this name,
    OSError if the file is no whole Parquet file.
    """
    with pa.OSFile(path) as file:
        if file.read(len(_ENCRYPTED)) == _ENCRYPTED:
            raise ValueError("it is encrypted")
        file.seek(0)
        parquet = pq.ParquetFile(
            file, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
        as_bytes = _bytes_of(parquet.schema_arrow, column)
        for rows in parquet.iter_batches(_ROWS, columns=[column], use_threads=False):
            for text in rows.column(0).view(as_bytes).to_pylist():
                known = None if text is None else text.decode("utf-8", "replace")
                yield json.dumps({column: known}, ensure_ascii=False).encode() + b"\n"


def _bytes_of(schema: pa.Schema, column: str) -> pa.DataType:
    """The binary type of a string column, which does not require UTF-8."""
    if schema.names.count(column) != 1:
        raise ValueError(f"it has no column {column!a}; its columns: {', '.join(schema.names)}")
    kind = schema.field(column).type
    if kind not in _BYTES:
        raise ValueError(f"its column {column!a} holds {kind}, not strings")
    return _BYTES[kind]
