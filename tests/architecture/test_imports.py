"""Import arrows: who may import whom inside the package, and what only one file may import."""

import ast
import sys
from pathlib import Path

import pytest

from support import PACKAGE, TOOLS, run_process

READ_THE_ENVIRONMENT = ("config/files", "common/code_caches", "signals/end_with_parent")
NUMPY_ONLY = (
    "bert_tools.common.log_reader",
    "bert_tools.common.student_t",
    "bert_tools.package.system_description",
    "bert_tools.package.verdict",
    "bert_tools.plan.cluster.calibrate_cli",
    "bert_tools.plan.cluster.calibration",
    "bert_tools.plan.cluster.cli",
    "bert_tools.plan.log_tree",
    "bert_tools.plan.memory_cli",
    "bert_tools.plan.published_results",
    "bert_tools.plan.recipes",
    "bert_tools.plan.samples_to_target",
    "bert_tools.plan.scaling_law",
    "bert_tools.plan.suggest",
    "bert_tools.report.doctor",
    "bert_tools.report.page",
    "bert_tools.report.pictures",
    "bert_tools.report.run",
    "bert_tools.report.summary",
    "bert_tools.report.tensorboard",
    "bert_tools.report.throughput_model",
    "bert_tools.squad.answers",
    "bert_tools.squad.bubble",
    "bert_tools.squad.comparison",
    "bert_tools.squad.offsets",
    "bert_tools.squad.options",
    "bert_tools.squad.plot",
    "bert_tools.squad.predictions",
    "bert_tools.squad.questions",
    "bert_tools.squad.quick_vocabulary",
    "bert_tools.squad.record",
    "bert_tools.squad.score_cli",
    "bert_tools.squad.scores",
    "bert_tools.squad.settings",
    "bert_tools.squad.study",
    "bert_tools.squad.study_text",
    "bert_tools.squad.table",
    "bert_tools.squad.windows",
    "bert_tools.tune.cli",
    "bert_tools.tune.search",
    "bert_tools.tune.workers",
    "bert_tools.watch.look",
    "bert_tools.watch.screen",
    "mlperf_bert.cli.config",
    "mlperf_bert.cli.explain",
    "mlperf_bert.common.health",
    "mlperf_bert.common.machine",
    "mlperf_bert.common.untrusted",
    "mlperf_bert.config.files",
    "mlperf_bert.data.balance",
    "mlperf_bert.data.batch_sampler",
    "mlperf_bert.data.capacity",
    "mlperf_bert.data.choose_capacity",
    "mlperf_bert.data.choose_sampler",
    "mlperf_bert.data.even_slots",
    "mlperf_bert.data.exchange_routes",
    "mlperf_bert.data.index",
    "mlperf_bert.data.mask_counts",
    "mlperf_bert.data.packing",
    "mlperf_bert.data.permutation",
    "mlperf_bert.data.published_shapes",
    "mlperf_bert.data.sampler",
    "mlperf_bert.data.set_checks",
    "mlperf_bert.data.shards",
    "mlperf_bert.data.step_plan",
    "mlperf_bert.data.strata",
    "mlperf_bert.data.token_packets",
    "mlperf_bert.distributed.bucket_plan",
    "mlperf_bert.optim.flat_layout",
    "mlperf_bert.optim.noise_scale",
    "mlperf_bert.parts.memory_plan",
    "mlperf_bert.prepare.foreign_features",
    "mlperf_bert.prepare.hdf5_examples",
    "mlperf_bert.prepare.sandbox",
    "mlperf_bert.run.outcome",
    "mlperf_bert.__main__",
)

FILES = sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])


def relative(path: Path) -> str:
    return path.relative_to((TOOLS if path.is_relative_to(TOOLS) else PACKAGE).parent).as_posix()


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


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_one_file_imports_mlperf_logging(path: Path) -> None:
    used = any(module.startswith("mlperf_logging") for module in imports(path))
    assert used == (relative(path) == "mlperf_bert/run/mlperf_log.py")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_hdf5_belongs_to_prepare(path: Path) -> None:
    if not relative(path).startswith("mlperf_bert/prepare/"):
        assert not any(module.startswith("h5py") for module in imports(path))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_environment_is_read_by_the_config_and_by_who_launches_only(path: Path) -> None:
    own = relative(path).removeprefix("mlperf_bert/")
    launching = {f"distributed/{name}.py" for name in ("launch", "spawn", "threads")}
    if own in launching | {f"{name}.py" for name in READ_THE_ENVIRONMENT}:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("os", "environ"), ("os", "getenv")}


@pytest.mark.parametrize("module", NUMPY_ONLY)
def test_planning_and_parsing_need_neither_torch_nor_numba(module: str) -> None:
    blocked = "sys.modules['torch'] = sys.modules['numba'] = None"
    done = run_process(sys.executable, "-c", f"import sys; {blocked}; import {module}")
    assert done.returncode == 0, done.stderr
