"""Import arrows: who may import whom inside the package, and what only one file may import."""

import ast
import sys
from pathlib import Path

import pytest

from support import PACKAGE, run_process

# A module may import from lower levels and from its own package; `prepare` stands aside.
LEVELS = (
    {"console", "end_with_parent", "exit_statuses", "messages"},
    {"errors", "machine", "untrusted"}
    | {"heartbeat", "status_file", "whereabouts"}
    | {"nvml", "student_t"},
    {"bounds", "code_caches", "config_options"},
    {"compiled"},
    {"config", "config_checks", "config_sections", "seeds", "system_description"}
    | {"crc32c", "health", "line_file", "log_reader", "run_lock", "signal_watch"},
    {"config_io", "stop_request"},
    {"data", "model", "optim", "distributed", "mlperf_log", "replay"},
    {"environment", "memory", "outcome", "noise_meter"},
    {
        "step",
        "evaluate",
        "metrics",
        "metrics_file",
        "checkpoint",
        "warm_up",
        "progress",
        "run_directory",
    }
    | {"eval_batches", "eval_schedule", "open_data", "stragglers", "noise_record"},
    {"graphs", "resume_checks"},
    {"resume"},
    {"build_step", "build_evaluation", "build_loader", "saving"},
    {"build_start"},
    {"build"},
    {"train", "bench", "reader_process", "stage_data", "system_cli", "evaluate_cli"}
    | {"checkpoint_vocabulary", "fill"},
    {"train_cli", "convert", "fill_cli"},
    {"doctor", "squad"},
    {"__main__"},
)
SAME_LEVEL = {
    ("config", "config_checks"),
    ("config", "config_sections"),
    ("config_checks", "config"),  # for its types only
    ("model", "data.batch"),
    ("model", "data.length_histogram"),
    ("model", "data.packing"),
    ("evaluate", "step"),
    ("evaluate", "eval_batches"),
    ("eval_schedule", "evaluate"),
    ("metrics", "noise_record"),
    ("metrics", "step"),
    ("warm_up", "step"),
    ("distributed", "optim.flat_buffers"),
}
OFFLINE = {"prepare", "plan", "package", "report", "tune", "watch"}
OFFLINE_MAY_IMPORT = {"errors", "compiled", "config", "config_checks", "config_io", "data"} | {
    "bounds",
    "code_caches",
    "console",
    "config_sections",
    "config_options",
    "crc32c",
    "health",
    "log_reader",
    "machine",
    "memory",
    "outcome",
    "student_t",
    "system_description",
    "untrusted",
}
PLAN_MAY_IMPORT = ("distributed.bucket_plan", "package.score")
DOCTOR_MAY_IMPORT = "prepare.verify"
CONVERT_MAY_IMPORT = (
    "prepare.any_vocabulary",
    "prepare.tokenizer_file",
    "prepare.vocabulary",
    "prepare.wordpiece",
)
FILL_MAY_IMPORT = (
    "prepare.any_vocabulary",
    "prepare.tokenizer_file",
    "prepare.vocabulary",
)
SQUAD_MAY_IMPORT = (
    "prepare.any_vocabulary",
    "prepare.sandbox",
    "prepare.tokenizer_file",
    "prepare.train_vocabulary",
    "prepare.vocabulary",
    "prepare.wordpiece",
)
OTHERS_MAY_IMPORT: dict[str, str | tuple[str, ...]] = {
    "package": "mlperf_log",
    "report": ("plan.convergence", "optim.noise_scale", "optim.throughput_model"),
    "squad": SQUAD_MAY_IMPORT,
    "tune": (
        *("end_with_parent", "exit_statuses", "messages", "signal_watch"),
        "report.metrics_reader",
    ),
    "watch": ("plan.convergence", "report."),
}
NUMPY_ONLY = {
    "data/balance.py",
    "data/batch_sampler.py",
    "data/capacity.py",
    "data/choose_capacity.py",
    "data/choose_sampler.py",
    "data/even_slots.py",
    "data/exchange_routes.py",
    "data/index.py",
    "data/mask_counts.py",
    "data/packing.py",
    "data/permutation.py",
    "data/published_shapes.py",
    "data/sampler.py",
    "data/set_checks.py",
    "data/shards.py",
    "data/step_plan.py",
    "data/strata.py",
    "data/token_packets.py",
    "distributed/bucket_plan.py",
    "health.py",
    "log_reader.py",
    "machine.py",
    "memory/plan.py",
    "optim/flat_layout.py",
    "optim/noise_scale.py",
    "optim/throughput_model.py",
    "outcome.py",
    "package/verdict.py",
    "plan/cluster/calibrate_cli.py",
    "plan/cluster/calibration.py",
    "plan/cluster/cli.py",
    "plan/explain.py",
    "plan/log_tree.py",
    "plan/memory_cli.py",
    "plan/published_results.py",
    "plan/recipes.py",
    "plan/samples_to_target.py",
    "plan/scaling_law.py",
    "plan/slurm_options.py",
    "plan/suggest.py",
    "prepare/foreign_features.py",
    "prepare/hdf5_examples.py",
    "prepare/sandbox.py",
    "report/doctor.py",
    "report/page.py",
    "report/pictures.py",
    "report/run.py",
    "report/summary.py",
    "report/tensorboard.py",
    "squad/answers.py",
    "squad/bubble.py",
    "squad/comparison.py",
    "squad/offsets.py",
    "squad/options.py",
    "squad/plot.py",
    "squad/predictions.py",
    "squad/questions.py",
    "squad/quick_vocabulary.py",
    "squad/record.py",
    "squad/score_cli.py",
    "squad/scores.py",
    "squad/settings.py",
    "squad/study.py",
    "squad/study_text.py",
    "squad/table.py",
    "squad/windows.py",
    "student_t.py",
    "system_description.py",
    "tune/cli.py",
    "tune/search.py",
    "tune/workers.py",
    "untrusted.py",
    "watch/look.py",
    "watch/screen.py",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> set[str]:
    """Dotted names of all modules a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def internal(path: Path) -> set[str]:
    prefix = "mlperf_bert."
    return {module.removeprefix(prefix) for module in imports(path) if module.startswith(prefix)}


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def level(unit: str) -> int:
    return next(number for number, units in enumerate(LEVELS) if unit in units)


def is_allowed(importer: str, module: str) -> bool:
    imported = module.split(".")[0]
    if imported == importer:
        return True
    if importer == "plan" and module.startswith(PLAN_MAY_IMPORT):
        return True
    if importer == "doctor" and module.startswith(DOCTOR_MAY_IMPORT):
        return True
    if importer == "convert" and module.startswith(CONVERT_MAY_IMPORT):
        return True
    if importer in {"checkpoint_vocabulary", "fill"} and module.startswith(FILL_MAY_IMPORT):
        return True
    if module.startswith(OTHERS_MAY_IMPORT.get(importer, "-")):
        return True
    if importer in OFFLINE:
        return imported in OFFLINE_MAY_IMPORT
    if imported in OFFLINE:
        return importer == "__main__"
    if any(importer == a and module.startswith(b) for a, b in SAME_LEVEL):
        return True
    return level(imported) < level(importer)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_arrows_point_down(path: Path) -> None:
    importer = owner(path)
    if importer == "__init__":
        assert not internal(path)
        return
    assert [module for module in sorted(internal(path)) if not is_allowed(importer, module)] == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_one_file_imports_mlperf_logging(path: Path) -> None:
    used = any(module.startswith("mlperf_logging") for module in imports(path))
    assert used == (relative(path) == "mlperf_log.py")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_hdf5_belongs_to_prepare(path: Path) -> None:
    if owner(path) != "prepare":
        assert not any(module.startswith("h5py") for module in imports(path))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_environment_is_read_by_the_config_and_by_who_launches_only(path: Path) -> None:
    launching = {f"distributed/{name}.py" for name in ("launch", "spawn", "threads")}
    if relative(path) in launching | {"config_io.py", "code_caches.py", "end_with_parent.py"}:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("os", "environ"), ("os", "getenv")}


@pytest.mark.parametrize("name", [*sorted(NUMPY_ONLY), "__main__.py", "config_io.py"])
def test_planning_and_parsing_need_neither_torch_nor_numba(name: str) -> None:
    module = "mlperf_bert." + name.removesuffix(".py").replace("/", ".")
    blocked = "sys.modules['torch'] = sys.modules['numba'] = None"
    done = run_process(sys.executable, "-c", f"import sys; {blocked}; import {module}")
    assert done.returncode == 0, done.stderr
