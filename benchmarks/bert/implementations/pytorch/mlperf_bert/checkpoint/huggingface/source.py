"""What every reader of foreign weights gives: named tensors, each read when it is asked for."""

from typing import Any, Protocol

from numpy.typing import NDArray


class SourceTensor(Protocol):
    """One tensor of a file that anybody may have written; nothing of it is in memory before `read`.

    `open_tensorflow` and `open_huggingface` return a mapping of names to such.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file says, and as fits its size."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the numbers in the file, such as float32 or bfloat16."""
        ...

    def read(self) -> NDArray[Any]:
        """All numbers, in the dtype's own kind (bfloat16 as float32). Raises CheckpointError."""
        ...
