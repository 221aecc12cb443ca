"""A checkpoint is read in the memory of one tensor, whatever its size."""

import tracemalloc
from pathlib import Path

import numpy as np

from bert_tools.convert.tensorflow import open_tensorflow
from mlperf_bert.common.crc32c import masked_crc32c
from tensorflow_tables import Field, fixed32, message, table

COUNT, ROWS = 12, 2**18
TENSOR_BYTES = 4 * ROWS
LITTLE = 2**18  # of tables, which are read whole


def write_v2(folder: Path) -> Path:
    data, entries = b"", [(b"", message((1, 1)))]
    for number in range(COUNT):
        values = np.full(ROWS, number, np.float32).tobytes()
        fields: list[Field] = [(1, 1), (2, [(2, [(1, ROWS)])]), (4, len(data)), (5, len(values))]
        entries.append((b"%03d" % number, message(*fields) + fixed32(6, masked_crc32c(values))))
        data += values
    (folder / "model.index").write_bytes(table(entries))
    (folder / "model.data-00000-of-00001").write_bytes(data)
    return folder / "model"


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    source = write_v2(tmp_path)
    tracemalloc.start()
    try:
        tensors = open_tensorflow(source)
        assert tracemalloc.get_traced_memory()[1] < LITTLE
        for number, tensor in enumerate(tensors.values()):
            assert tensor.shape == (ROWS,)
            assert (tensor.read() == number).all()
        assert len(tensors) == COUNT
        # Itself, and the comparison's answer, a byte each.
        assert TENSOR_BYTES < tracemalloc.get_traced_memory()[1] < 1.25 * TENSOR_BYTES + LITTLE
    finally:
        tracemalloc.stop()
