"""Our own checks of a submission, each spoiled one refused in one line, and a checker's words."""

import json
import re
import shutil

import pytest

from bert_tools.package.checkers import Call, judge, scaling_of
from bert_tools.package.export import export
from bert_tools.package.own_checks import (
    UNKNOWN,
    check_description,
    check_systems,
    read_description,
)
from submissions import (
    OPEN,
    change,
    describe,
    drop,
    log_of,
    miss_target,
    write_log,
    write_records,
    write_repository,
)
from support import mlperf_records


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Good runs in the open division. Not to be changed."""
    root = tmp_path_factory.mktemp("repository")
    write_repository(root, {OPEN: "open"})
    return root


@pytest.fixture
def root(repository, tmp_path):
    """A copy to be spoiled."""
    shutil.copytree(repository, tmp_path / "repository")
    return tmp_path / "repository"


def own_problems(root):
    """The problems found without MLCommons' checkers."""
    tree = root.with_name("tree")
    systems, problems = export(root, root / "results", tree)
    problems += check_systems(tree, systems)[1]
    return [str(problem) for problem in problems]


def test_nothing_is_found_where_nothing_is_wrong(repository):
    assert own_problems(repository) == []


def add_link(root):
    log_of(root, 3).unlink()
    log_of(root, 3).symlink_to(log_of(root, 4))


def write_text(name, text=""):
    return lambda root: (root / name).write_text(text)


def describe_with(**changed):
    return lambda root: describe(root, **changed)


def change_log(key, **members):
    return lambda root: change(log_of(root, 3), key, **members)


def unlink(name):
    return lambda root: (root / name).unlink()


def drop_record(key):
    return lambda root: drop(log_of(root, 3), key)


def miss_two(root):
    for number in (3, 4):
        miss_target(log_of(root, number))


def goes_on(root):
    records = mlperf_records(log_of(root, 3))
    write_records(log_of(root, 3), [*records, records[0]])


def two_seeds(root):
    records = mlperf_records(log_of(root, 3))
    place = [each["key"] for each in records].index("seed")
    write_records(log_of(root, 3), [*records[:place], records[place], *records[place:]])


RESULTS, SYSTEM = f"results/{OPEN}/bert", f"systems/{OPEN}.json"
BYPASS = write_text(f"{RESULTS}/package_checker_params", "rcp-bypass")
OTHER_BATCH = r"have different values of 'global_batch_size' \(448, 512\); use"
REFUSED = {
    "nine logs": (
        unlink(f"{RESULTS}/result_9.txt"),
        r"bert: contains 9 logs instead of 10 \(missing: result_9\.txt\); provide",
    ),
    "eleven logs": (
        lambda root: write_log(log_of(root, 10), "open", 999, 12.0),
        r"contains 11 logs instead of 10 \(not expected: result_10\.txt\); provide",
    ),
    "no log": (
        lambda root: shutil.rmtree(root / "results" / OPEN),
        "results: contains no results of a system; copy",
    ),
    "aborted": (
        change_log("run_stop", metadata={"status": "aborted"}),
        r"result_3\.txt: the status of the run is 'aborted'; use",
    ),
    "two missed": (miss_two, r"result_3\.txt, result_4\.txt missed the target, and MLPerf accepts"),
    "other weights": (
        drop_record("weights_initialization"),
        r"different values of 'weights_initialization' \(",
    ),
    "no target": (
        change_log("quality_target", value="none"),
        "had no target .*; set eval.target_accuracy to a number",
    ),
    "no kind": (
        change_log("initial_weights", value=7),
        "initial_weights must be of type str, not 7; rerun it",
    ),
    "resumed": (change_log("resumed", value=True), r"result_3\.txt: the run was resumed"),
    "no rules": (change_log("rules_enforced", value=False), "enforce_rules = false; set"),
    "equal seeds": (
        change_log("seed", value=105),
        r"result_3\.txt, result_5\.txt have the same seed 105; rerun",
    ),
    "two seeds": (two_seeds, r"result_3\.txt: has 2 records of seed instead of one; rerun it"),
    "below target": (
        change_log("eval_accuracy", value=0.71),
        "last accuracy, 0.71, is below the target of",
    ),
    "other batch": (change_log("global_batch_size", value=512), OTHER_BATCH),
    "other benchmark": (change_log("submission_benchmark", value="gnmt"), "benchmark is 'gnmt'"),
    "more nodes": (
        change_log("number_of_nodes", value=2),
        "used 2 nodes, but systems/.* describes 1; move",
    ),
    "backwards": (
        change_log("run_stop", time_ms=5),
        r"result_3\.txt: run_stop is not later than run_start",
    ),
    "in words": (
        change_log("eval_accuracy", value="high"),
        "must be a number from 0 to 1, not 'high'",
    ),
    "older version": (drop_record("resumed"), "has no record of resumed, so the run did not"),
    "no weights": (drop_record("initial_weights"), "has no record of initial_weights, so the run"),
    "killed run": (drop_record("run_stop"), "has no record of run_stop, so"),
    "goes on": (goes_on, "has the record 'cache_clear' after run_stop; rerun it"),
    "missing field": (describe_with(framework=None), rf"{SYSTEM}: framework is missing; correct"),
    "other division": (
        describe_with(division="closed"),
        "'open', but systems/.* has 'closed'; correct",
    ),
    "idle accelerators": (
        describe_with(accelerators_per_node="16"),
        "used 8 ranks, but systems/.* describes 1 x 16 accelerators",
    ),
    "not measured": (
        describe_with(cooling=UNKNOWN, framework=f"PyTorch, version {UNKNOWN}"),
        rf"{SYSTEM}: does not know cooling, framework; run `mlperf_bert system {OPEN}` on",
    ),
    "no description": (unlink(SYSTEM), rf"{SYSTEM}: is missing; copy another"),
    "broken description": (write_text(SYSTEM, "{"), rf"^{SYSTEM}: cannot be read \("),
    "dot file": (write_text(f"{RESULTS}/.DS_Store"), r"bert/\.DS_Store: .* a dot; remove it"),
    "dot file in systems": (write_text("systems/.swp"), r"systems/\.swp: has a name that begins"),
    "link": (add_link, r"bert/result_3\.txt: is a symbolic link; remove it"),
    "a way around": (BYPASS, "package_checker_params: is not a result; keep only"),
    "no licence": (unlink("LICENSE"), "LICENSE: is missing; restore this file"),
}


@pytest.mark.parametrize(("mutate", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_spoiled_submission_is_refused_with_its_reason(mutate, reason, root):
    mutate(root)
    problems = own_problems(root)
    assert any(re.search(reason, problem) for problem in problems), problems
    assert all(problem.isprintable() for problem in problems)


def test_all_that_is_wrong_is_found_at_once(root):
    wrong = ("nine logs", "resumed", "below target", "missing field", "dot file", "no licence")
    for name in wrong:
        REFUSED[name][0](root)
    problems = own_problems(root)
    assert len(problems) == len(wrong)


def test_the_closed_division_has_a_target_and_a_checkpoint_of_its_own(root):
    describe(root, division="closed")
    for number in range(10):
        change(log_of(root, number), "submission_division", value="closed")
    assert own_problems(root) == []
    shutil.rmtree(root.with_name("tree"))
    change(log_of(root, 3), "initial_weights", value="random")
    change(log_of(root, 4), "eval_samples", value=2000)
    change(log_of(root, 5), "quality_target", value=0.7)
    change(log_of(root, 5), "eval_accuracy", value=0.71)
    problems = own_problems(root)
    for wanted in (
        "result_3.txt: the closed division forbids initial_weights 'random'; rerun from",
        "target is 0.7; for the closed division, train to",
        "result_4.txt: the accuracy was measured on 2,000 samples; for the closed division",
    ):
        assert sum(wanted in problem for problem in problems) == 1
    assert sum("--init-checkpoint" in problem for problem in problems) == 1


def test_open_runs_may_start_from_anything_but_all_from_the_same(root):
    for number in range(10):
        change(log_of(root, number), "initial_weights", value="random")
    assert own_problems(root) == []
    shutil.rmtree(root.with_name("tree"))
    change(log_of(root, 3), "initial_weights", value="checkpoint")
    (problem,) = own_problems(root)
    assert "different values of 'initial_weights' ('checkpoint', 'random')" in problem


WANTED = {"INFO - Run 10/10": 1, "INFO - SUCCESS": 1, "INFO - RCP Test Passed: ": 0}
CALL = Call("5.0.0", "package_checker", "the package", (), WANTED)
GOOD = "WARNING -  harmless\nINFO - Run 10/10\nINFO - SUCCESS\n"


def test_only_the_words_of_a_checker_count():
    assert judge(CALL, 0, GOOD) == ()
    assert judge(CALL, 1, GOOD) != ()
    assert judge(CALL, 0, "INFO - Run 10/10\n") != ()
    assert judge(CALL, 0, "INFO - SUCCESS\n") != ()
    for line in (
        "INFO - Run 10/10",
        "INFO - RCP Test Passed: RCP found",
        "ERROR - anything",
        "Traceback (most recent call last):",
        "WARNING -  Skipping benchmark: gnmt",
        "WARNING -  1 file does not comply, accepting this under olympic scoring",
        "INFO - Bypassing Seed Checker",
        "WARNING -  RCP test failed but allowed to proceed with RCP bypass.",
        "WARNING - Unknown files in result directory: x",
        "INFO - CHECKS FAILED.",
    ):
        assert judge(CALL, 0, f"{GOOD}{line}\n") != (), line


def test_a_scaling_factor_is_read_where_the_checker_left_one(tmp_path):
    assert scaling_of(tmp_path, OPEN) == 1.0
    directory = tmp_path / "results" / OPEN / "bert"
    directory.mkdir(parents=True)
    (directory / "scaling.json").write_text('{"scaling_factor": 1.0477}')
    assert scaling_of(tmp_path, OPEN) == 1.0477


DESCRIPTION = {
    "cooling": "",
    "other_software_stack": "",
    "submitter": "Acme",
    "division": "open",
    "status": "Available cloud",
    "system_name": "box",
    "number_of_nodes": "2",
    "host_processors_per_node": "1",
    "accelerators_per_node": "0",
    "framework": "PyTorch 2.13.0",
}


def test_wrong_values_and_missing_fields():
    for field, value, problem in (
        ("number_of_nodes", 8, "must be a string, not 8"),
        ("number_of_nodes", "0", "must be a whole number of at least 1"),
        ("accelerators_per_node", "\N{ARABIC-INDIC DIGIT EIGHT}", "must be a whole number"),
        ("other_software_stack", {"cuda": "13"}, "must be a string, not a dict"),
        ("division", "Closed", "'closed', 'open'"),
        ("submitter", " ", "empty"),
    ):
        (found,) = check_description({**DESCRIPTION, field: value})
        assert found.startswith(field) and problem in found
    assert check_description(DESCRIPTION | {"system_type": "7"}) == []
    assert check_description(DESCRIPTION | {"host_processors_per_node": UNKNOWN}) == []
    of_mlcommons = {"cooling", "other_software_stack", "status"}  # whose checker looks at them
    for field in DESCRIPTION.keys() - of_mlcommons:
        rest = {name: value for name, value in DESCRIPTION.items() if name != field}
        assert check_description(rest) == [f"{field} is missing"]


def test_what_is_no_description_is_one_problem(tmp_path):
    for name, contents in (("list", b"[]"), ("broken", b"{"), ("binary", b"\xff\xfe")):
        (tmp_path / name).write_bytes(contents)
        (problem,) = read_description(tmp_path / name, name)[1]
        assert str(problem).startswith(f"{name}: cannot be read (")
    wrong = DESCRIPTION | {"submitter": "", "division": "both"}
    (tmp_path / "wrong").write_text(json.dumps(wrong))
    assert len(read_description(tmp_path / "wrong", "wrong")[1]) == 2
