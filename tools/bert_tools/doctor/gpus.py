"""The check `gpus`: devices of torch and the driver, and their number for the config's ranks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert_tools.common.nvml import nvml_handle
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.network_test.findings import Finding, Options, fail, info, ok, warn

LOWEST_CAPABILITY = (7, 0)  # the oldest that Triton compiles for
_NAME = "gpus"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One device as torch sees it; the last four are NVML's, None if it does not say."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All devices; `driver_gpus` is the number that the driver lists, usable by torch or not.

    `cuda` is the CUDA version that torch was built with, None for a build without.
    """

    torch: str
    cuda: str | None
    driver: str | None
    driver_gpus: int
    gpus: tuple[GpuFacts, ...]


def check(options: Options) -> list[Finding]:
    """Check the GPUs of this machine."""
    return judge(read_facts(), options.config, wants_cuda=options.wanted_device == "cuda")


def judge(facts: Facts, config: RunConfig | None, *, wants_cuda: bool) -> list[Finding]:
    """Findings about the GPUs."""
    torch_in_words = f"torch {facts.torch}, " + (f"CUDA {facts.cuda}" if facts.cuda else "no CUDA")
    if not facts.gpus:
        return [_without(facts, torch_in_words, wants_cuda)]
    return [
        _all_equal(facts, torch_in_words),
        *_each(facts.gpus),
        *_too_few(config, len(facts.gpus)),
    ]


def _without(facts: Facts, torch_in_words: str, wants_cuda: bool) -> Finding:
    if facts.driver_gpus:
        found = f"the driver lists {facts.driver_gpus} GPUs, {torch_in_words} can use none"
        if facts.cuda is None:
            return fail(_NAME, found, "install a torch that was built for CUDA")
        remedy = f"check that driver {facts.driver or 'unknown'} fits it (nvidia-smi)"
        return fail(_NAME, found, remedy + ", and CUDA_VISIBLE_DEVICES")
    found = f"none, {torch_in_words}: trains on the CPU"
    if wants_cuda:
        remedy = "use a machine with GPUs, or run.device 'cpu'; docker run needs --gpus all"
        return fail(_NAME, found + ", the config asks for 'cuda'", remedy)
    return info(_NAME, found, "where there should be GPUs: install the driver; docker --gpus all")


def _all_equal(facts: Facts, torch_in_words: str) -> Finding:
    kinds = Counter((gpu.name, round(gpu.memory_bytes / 2**30)) for gpu in facts.gpus)
    found = ", ".join(f"{count} x {name} {gib} GiB" for (name, gib), count in kinds.items())
    found += f", driver {facts.driver or 'unknown'}, {torch_in_words}" + _ecc_and_clocks(facts.gpus)
    if len(kinds) > 1:
        return warn(_NAME, found, "ranks wait for the slowest GPU: use equal ones")
    return ok(_NAME, found)


def _ecc_and_clocks(gpus: tuple[GpuFacts, ...]) -> str:
    words = ""
    with_ecc = [gpu.ecc for gpu in gpus if gpu.ecc is not None]
    if with_ecc:
        words += f", ECC on for {sum(with_ecc)} of {len(with_ecc)}"
    most = [gpu.most_clock_mhz for gpu in gpus if gpu.most_clock_mhz is not None]
    now = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz is not None]
    if most and now:
        words += f", clocks {min(now)}-{max(now)} MHz now, at most {min(most)}"
    return words


def _each(gpus: tuple[GpuFacts, ...]) -> list[Finding]:
    findings = []
    for index, gpu in enumerate(gpus):
        name = f"{_NAME}.{index}"
        if gpu.capability < LOWEST_CAPABILITY:
            found = f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            findings.append(fail(name, found, "use one of 7.0 (Volta) or later, or the CPU"))
        if gpu.uncorrected_errors:
            found = f"{gpu.name} has {gpu.uncorrected_errors} uncorrected memory errors"
            findings.append(fail(name, found, "reset or replace it (nvidia-smi -q -d ECC)"))
    return findings


def _too_few(config: RunConfig | None, num_gpus: int) -> list[Finding]:
    if config is None or config.run.device == "cpu" or config.parallel.share_gpu == "allow":
        return []
    ranks = config.parallel.ranks_per_node
    if ranks <= num_gpus:
        return []
    found = f"{num_gpus} for {ranks} ranks a node of the config"
    return [fail(_NAME + ".ranks", found, "use the config of this machine's size")]


def read_facts() -> Facts:
    """Ask torch, the driver's files and NVML. Raises what torch raises."""
    import torch

    from mlperf_bert.common.machine import read_machine

    machine = read_machine()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Facts(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=machine.driver,
        driver_gpus=len(machine.gpus),
        gpus=tuple(_read_gpu(index) for index in range(count)),
    )


def _read_gpu(index: int) -> GpuFacts:
    import torch

    properties = torch.cuda.get_device_properties(index)
    told = nvml_handle(index)
    return GpuFacts(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        **({} if told is None else _from_nvml(*told)),
    )


def _from_nvml(nvml: Any, handle: Any) -> dict[str, Any]:
    questions: dict[str, Callable[[], object]] = {
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
        "uncorrected_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "most_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    return {name: _asked(question) for name, question in questions.items()}


def _asked(question: Callable[[], object]) -> Any:
    """NVML's answer; None if this GPU has none."""
    try:
        return question()
    except Exception:
        return None


def heat(index: int) -> tuple[int | None, tuple[str, ...]]:
    """Degrees Celsius of torch's device `index` now, and why its clocks are held down, if known."""
    found = nvml_handle(index)
    if found is None:
        return None, ()
    nvml, handle = found
    degrees = _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    bits = _asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return degrees, throttle_words(bits or 0)


_SLOWED_BY = {  # NVML's nvmlClocksThrottleReasons that a healthy machine does not show
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def throttle_words(bits: int) -> tuple[str, ...]:
    """The reasons among NVML's bits that mean heat or want of power (not the normal power cap)."""
    return tuple(word for bit, word in _SLOWED_BY.items() if bits & bit)
