"""What matrix products reach on this machine, measured once a comparison: MFU is a share of it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from bert_tools.squad.options import DataOptions, random_model
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import say
from mlperf_bert.common.records import read_record, write_json

PEAK = "peak.json"
SECONDS = 3.0
_ROWS = 4096  # tokens: many enough that a product is bound by arithmetic
_REMEDY = "remove it: it is measured again"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePeak:
    """TFLOP/s of one GPU, or of all cores; None, and `means` says why, where it is unknown."""

    tflops: float | None
    means: str


def peak_of_machine(out: Path, data: DataOptions, settings: SquadSettings) -> MachinePeak:
    """As it was measured before, or now. Raises DataError for a file that is none of ours."""
    path = out / PEAK
    if path.exists():
        record = read_record(path, missing="is missing", remedy=_REMEDY)
        tflops = record.number("tflops") if record.has("tflops") else None
        return MachinePeak(tflops=tflops, means=record.text("means"))
    peak = _measure(data, settings)
    write_file(path, write_json(asdict(peak)))
    return peak


def _measure(data: DataOptions, settings: SquadSettings) -> MachinePeak:
    from dataclasses import replace

    import torch

    from bert_tools.bench.flops import measure_peak
    from mlperf_bert.checkpoint.manifest import read_config
    from mlperf_bert.common.machine import usable_cpus

    if settings.precision == "fp64":
        return MachinePeak(tflops=None, means="not measured in fp64")
    model = random_model(data, 1, settings.max_length)
    if data.init_checkpoint is not None:
        model = read_config(data.init_checkpoint).model
    model = replace(model, precision=settings.precision)
    on_gpu = data.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    say(f"measuring the peak of matrix products, {SECONDS:g} s")
    before = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(len(usable_cpus()))
    try:
        peak = measure_peak(model, _ROWS, device, SECONDS)
    finally:
        torch.set_num_threads(before)
    where = "one GPU" if on_gpu else f"all {len(usable_cpus())} cores"
    words = (
        f"what {peak.dtype} products of the feed-forward part reach on {where}, measured for "
        f"{SECONDS:g} s before the runs"
    )
    return MachinePeak(tflops=peak.long_tflops, means=peak.reason or words)
