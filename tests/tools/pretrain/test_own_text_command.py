"""`pretrain`: which model a text gets, from text to what others load, and on after a stop."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from bert_tools.pretrain import choose
from bert_tools.pretrain import cli as pretrain
from forked_starts import start_each
from mlperf_bert.__main__ import main, make_parser
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import bf16_instructions, usable_cpus
from mlperf_bert.run import console
from own_texts import write_letters
from run_cases import end_run, write_run
from support import CONFIGS, REPOSITORY, refusal, run_process

PAGE = (REPOSITORY / "docs" / "guides" / "own_text.md").read_text(encoding="utf-8")
SMALL = (
    *("--set", "model.hidden_size=32", "--set", "model.intermediate_size=64"),
    *("--set", "model.num_layers=1", "--set", "model.vocab_size=300"),
    *("--set", "parallel.ranks_per_node=1", "--set", "mlperf.enforce_rules=false"),
    *("--set", "run.device=cpu", "--set", "schedule.warmup_steps=2"),
)
SHORT = (  # at a rate by which twelve steps show
    *("--set", "schedule.decay_steps=12", "--set", "run.seed=1"),
    *("--set", "optim.learning_rate=0.01"),
)


def chosen(*words, device="cpu"):
    """The plan for a text; without a device, of the GPUs that there seem to be."""
    return choose.choose(parsed(*words, *(("--set", f"run.device={device}") if device else ())))


def parsed(*words):
    parser = ArgumentParser()
    pretrain.add_arguments(parser)
    return parser.parse_args([*map(str, words), "--out", "out"])


def of_size(path, num_bytes):
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def test_steps_and_vocabulary_follow_the_text_within_bounds(tmp_path):
    tiny, usual, huge = (
        chosen(of_size(tmp_path / f"{size}.txt", size)).config
        for size in (1_000, 1_500_000, 2_000_000_000)
    )
    assert (tiny.model.vocab_size, tiny.max_steps) == (512, choose.MIN_STEPS)
    assert usual.model.vocab_size == 4096
    samples = 1_500_000 / choose.BYTES_PER_TOKEN / usual.data.max_seq_length
    passes = usual.max_steps * usual.parallel.global_batch_size / samples
    assert passes == pytest.approx(choose.PASSES["pretrain_cpu"], rel=0.01)
    assert (huge.model.vocab_size, huge.max_steps) == (8192, 15_000)
    assert tiny.schedule.warmup_steps < usual.schedule.warmup_steps <= huge.schedule.warmup_steps
    ranks = min(len(usable_cpus()), choose.MAX_CPU_RANKS)
    batch = 32 // ranks * ranks
    assert (usual.parallel.ranks_per_node, usual.parallel.global_batch_size) == (ranks, batch)


def test_the_architecture_of_today(tmp_path, monkeypatch):
    text = of_size(tmp_path / "a.txt", 10**6)
    plain, modern = chosen(text).config, chosen(text, "--architecture", "modern").config
    assert modern.model.architecture == "modern"
    assert (modern.data.masking_rate, modern.data.max_seq_length) == (0.3, 128)
    assert modern.model.num_parameters == pytest.approx(plain.model.num_parameters, rel=0.02)
    assert modern.max_steps == plain.max_steps
    for other in ("--config", "--init-checkpoint"):
        with pytest.raises(ConfigError, match=f"cannot be combined with {other}"):
            chosen(text, "--architecture", "modern", other, CONFIGS / "pretrain_cpu.toml")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = chosen(text, "--architecture", "modern", device=None).config
    assert (config.model.num_layers, config.data.max_seq_length) == (22, 1024)
    assert (config.parallel.ranks_per_node, config.parallel.global_batch_size) == (2, 256)


def test_static_masks_are_drawn_in_as_many_passes_as_the_config_says(tmp_path):
    text = of_size(tmp_path / "a.txt", 10**6)
    for masking, rate, passes in (("static", 0.15, 10), ("dynamic", 0.2, 1)):
        masks = ("--set", f"data.masking={masking}", "--set", f"data.masking_rate={rate}")
        args = parsed(text, *masks)
        settings = pretrain._request(args, choose.choose(args)).settings
        assert (settings.segments, settings.dupe_factor) == ("single", passes)


def test_what_the_user_sets_stays(tmp_path):
    text = of_size(tmp_path / "a.txt", 10**6)
    for ranks in (1, 3, 5, 6, 7):
        set_by = ("--set", "schedule.decay_steps=7", "--set", f"parallel.ranks_per_node={ranks}")
        config = chosen(text, *set_by).config
        assert (config.max_steps, config.parallel.ranks_per_node) == (7, ranks)
        assert config.parallel.global_batch_size == 32 // ranks * ranks
    other = chosen(text, "--config", "encoder_cpu_tiny")  # is taken as it is
    assert other.settings == ()


@pytest.mark.parametrize(("has", "precision"), [([], "fp32"), (["amx_bf16"], "bf16_autocast")])
def test_a_cpu_with_instructions_for_bf16_uses_them(tmp_path, monkeypatch, has, precision):
    monkeypatch.setattr(choose, "bf16_instructions", lambda: has)
    text = of_size(tmp_path / "a.txt", 10**6)
    plan = chosen(text)
    assert plan.config.model.precision == precision
    assert plan.in_words().endswith(f", in {precision}")
    assert chosen(text, "--set", "model.precision=fp32").config.model.precision == "fp32"
    assert chosen(text, "--config", "encoder_cpu_tiny").config.model.precision == "fp32"


def test_on_gpus_it_is_the_model_for_them(tmp_path, monkeypatch):
    text = of_size(tmp_path / "a.txt", 10**8)
    for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")  # of an interactive shell
    for name in ("STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for num_gpus, batch in ((4, 256), (3, 252), (1, 256)):
        monkeypatch.setattr("torch.cuda.device_count", lambda found=num_gpus: found)
        plan = chosen(text, device=None)
        parallel = plan.config.parallel
        assert (parallel.ranks_per_node, parallel.global_batch_size) == (num_gpus, batch)
        assert parallel.data_parallel == ("flat" if num_gpus > 1 else "ddp")
        assert plan.config_path.stem == "pretrain_gpu"
        words = choose.expected(plan)
        sequences, tokens = plan.config.max_steps * batch, plan.config.data.max_seq_length
        work = 6 * plan.config.model.num_parameters * sequences * tokens
        seconds = work / (choose.GPU_FLOPS * num_gpus)
        assert f"{sequences:,} sequences, about {console.as_clock(seconds)} (assumed" in words
    assert "on 1 GPU:" in plan.in_words()


def test_a_login_node_chooses_for_the_nodes_of_the_page(tmp_path, monkeypatch, capsys):
    """The section's lines: a config of 16 ranks, for the text that it prepares and for the job."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    of_size(tmp_path / "my_text", 10**6)
    section = PAGE.partition("\n## On several nodes\n")[2].partition("\n## ")[0]
    choosing, preparing, rehearsing, finishing = (
        shlex.split(line)[1:]
        for line in re.findall(r"^mlperf_bert .*$", section.replace("\\\n", ""), re.MULTILINE)
    )
    *words, arrow, file = choosing
    plain = words.index("--set", words.index("--only"))
    for device in (["--set", "run.device=cuda"], ["--config", "pretrain_gpu"]):
        assert main([*words[:plain], *device, *words[plain + 2 :]]) == 0
        Path(file).write_text(capsys.readouterr().out)
        config = load_config(Path(file))
        assert (config.run.device, config.run.step_mode) == ("cuda", "captured")
        assert (config.model.precision, config.model.num_layers) == ("bf16", 12)
        parallel = config.parallel
        assert (parallel.world_size, parallel.global_batch_size) == (16, 256)
        assert parallel.data_parallel == "flat"
    plan = choose.choose(make_parser(preparing).parse_args(preparing))
    assert plan.config == config and " on 16 GPUs: " in plan.in_words()  # nothing is chosen again
    assert "assumed, not measured" in choose.expected(plan)
    assert arrow == ">" and make_parser(rehearsing).parse_args(rehearsing).config == Path(file)
    script = re.search(r"sbatch \$\((\S+) ", section)[1]
    done = run_process(sys.executable, REPOSITORY / script, file, PYTHON="python3")
    assert " --nodes=2 --ntasks-per-node=8 " in done.stdout
    run_dir = re.search(r"LOGDIR=(\S+)", section)
    found = []
    monkeypatch.setattr(pretrain, "_finish", lambda *given: found.append(given) or 0)
    assert main(finishing) == 0
    assert found == [(Path(run_dir[1]) / "run_0", Path("my_model/data"), Path("my_model/exported"))]
    wrong = ("--set", "model.precision=fp32")
    assert "'captured' does not work on 'cuda'" in refusal(capsys, *words, *wrong)


def test_bad_starts_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "SILENCE_S", (300.0, 300.0))  # no more lines on a busy machine
    out = ("--out", str(tmp_path / "out"))
    assert "TEXT: there is no file" in refusal(capsys, "pretrain", tmp_path / "none", *out)
    text = write_letters(tmp_path / "text")
    for place, problem in (
        (
            text / "out",
            f"--out: files in {text / 'out'} would be read as part of the text in {text}",
        ),
        (Path(__file__) / "out", f"{Path(__file__) / 'out'}/run: Not a directory"),
    ):
        assert problem in refusal(capsys, "pretrain", text, "--out", place)
    with pytest.raises(SystemExit, match="2"):
        main(["pretrain", str(text), *out, "--documents", "files"])
    assert "--documents must be 'file' or 'empty-line', not 'files'" in capsys.readouterr().err
    assert not (text / "out").exists()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    for name, value in (("SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert "was started once per rank" in refusal(capsys, "pretrain", __file__, *out)
    assert list(tmp_path.iterdir()) == [text]


def test_only_a_run_that_has_ended_is_measured(tmp_path, capsys):
    run = write_run(tmp_path / "run") / "run_0"
    words = ("pretrain", __file__, "--only", "finish", "--out")
    (run / "checkpoints").mkdir()
    for out, each in ((run, run), (tmp_path / "none", tmp_path / "none" / "run" / "run_0")):
        assert f"{each}: contains no run that has ended; pass" in refusal(capsys, *words, out)
    end_run(run, "aborted", stopped_by="SIGINT")
    said = f"{run}: was stopped by SIGINT after 20 steps; resume it first"
    assert said in refusal(capsys, *words, run)


def test_what_may_not_be_read_is_one_line(tmp_path):
    secret, out = tmp_path / "secret", ("--out", tmp_path / "out")
    secret.mkdir()
    commands = [
        ("pretrain", secret / "a.txt", *out),
        ("prepare", "--corpus", secret / "a.txt", *out),
        ("pretrain", __file__, "--out", secret / "out"),
        ("pretrain", __file__, *out, "--init-checkpoint", secret / "weights"),
    ]
    try:
        secret.chmod(0)
        for started in start_each(commands, without_rights=os.geteuid() == 0):
            error = started.printed.splitlines()[-1]
            assert error.startswith(f"mlperf_bert: error: {secret}/") and started.status == 2
            assert "Permission denied" in error and "Traceback" not in started.printed
    finally:
        secret.chmod(0o700)


def do_what_the_docs_do(out, monkeypatch):
    """What stands in them of a text's model: a classifier, and embeddings of sentences."""
    (out.parent / "my_model").symlink_to(out)
    monkeypatch.chdir(out.parent)
    found = {}
    section = PAGE.partition("\n## What to do with the model\n")[2]
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(compile(block, "own_text.md", "exec"), found)
    assert math.isfinite(found["loss"].item())
    assert json.loads(Path("classifier/config.json").read_text())["hidden_size"] == 32
    again = found["SentenceTransformer"]("embedder").encode(["Close the file.", "Add two numbers."])
    assert again.shape == (2, 32) and abs(again).max() > 0
    assert again[0] == pytest.approx(found["embeddings"][0], abs=1e-5)


def assert_precision_and_ranks_are_kept(run_dir, line, monkeypatch):
    """A run keeps the precision and the ranks of the machine it began on, also on another one."""
    precision = "bf16_autocast" if bf16_instructions() else "fp32"
    assert line.endswith(f", in {precision}")
    with monkeypatch.context() as on_another_machine:
        has = [] if bf16_instructions() else ["amx_bf16"]
        on_another_machine.setattr(choose, "bf16_instructions", lambda: has)
        on_another_machine.setattr(choose, "usable_cpus", lambda: set(range(6)))
        (ranks,) = re.findall(r", (\d+) ranks?, in ", line)
        assert choose.on_cpu(run_dir) == (precision, int(ranks))
        assert choose.on_cpu(run_dir / "none") == ("bf16_autocast" if has else "fp32", 6)


def assert_it_is_finished_without_the_gpu_of_its_training(command, out, monkeypatch):
    shutil.rmtree(out / "exported")
    first = (out / "run/run_0/pretrain.json").read_bytes()

    def of_gpu(path):
        config = read_config(path)
        return replace(config, run=replace(config.run, device="cuda"))

    with monkeypatch.context() as of_another_machine:
        of_another_machine.setattr("mlperf_bert.checkpoint.manifest.read_config", of_gpu)
        assert main([*command, "--only", "finish"]) == 0
    assert (out / "exported" / "README.md").exists()
    assert (out / "run/run_0/pretrain.json").read_bytes() == first


@pytest.mark.parametrize(
    "architecture", ["bert", pytest.param("modern", marks=pytest.mark.longest)]
)
def test_from_text_to_what_transformers_loads(tmp_path, architecture, monkeypatch, capfd):
    import transformers

    text, out = write_letters(tmp_path / "text", 160), tmp_path / "out"
    (out / "exported").mkdir(parents=True)
    typed = re.findall(r"^mlperf_bert (pretrain .*)$", PAGE, re.MULTILINE)[0]
    command = [
        {"my_text": str(text), "my_model": str(out)}.get(each, each) for each in typed.split()
    ]
    if architecture == "modern":
        command += ["--architecture", "modern"]
    assert main([*command, *SMALL, *SHORT]) == 0
    said = capfd.readouterr().out
    lines = said.splitlines()
    assert lines[1].startswith("model: pretrain_cpu on the CPU: 1 layers of 32")
    assert_precision_and_ranks_are_kept(out / "run", lines[1], monkeypatch)
    assert lines[2].startswith("training: 12 steps, 384 sequences, about 0:")
    assert said.count(" fill --checkpoint ") == said.count(" --labelled FILE") == 1
    facts = json.loads((out / "run" / "run_0" / "pretrain.json").read_text())
    shown = f"held-out accuracy {facts['accuracy']:.4f} (compared with "
    shown += f"{facts['context_free_accuracy']:.4f} of a context-free baseline"
    shown += f", and {facts['untrained']:.4f} before training)"
    assert lines[-1] == f"pretrain: {shown}"
    assert facts["accuracy"] > facts["untrained"]
    card = (out / "exported" / "README.md").read_text()
    assert shown in card
    assert "12 steps of 32 sequences" in card
    assert f"The model was trained on {facts['documents']} documents." in card
    share = facts["left_out"] / facts["characters"]
    left_out = f"{facts['characters']:,} characters, of which {share:.1%} were left out."
    assert f"The text had {left_out}" in card
    masked, _, words = facts["example"].partition(" (")
    assert "[MASK]" in masked and words.count("0.") == 3
    typed = re.findall(r"^mlperf_bert (fill .*)$", PAGE, re.MULTILINE)[0]
    assert main(shlex.split(typed.replace("my_model", str(out)))) == 0
    assert len(capfd.readouterr().out.splitlines()) == 5
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "exported")
    model = transformers.AutoModelForMaskedLM.from_pretrained(out / "exported")
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 128
    fill = transformers.pipeline(
        "fill-mask", model=model, tokenizer=tokenizer, tokenizer_kwargs={"truncation": True}
    )
    assert len(fill("[MASK] " + "wcg wbf " * 200)) == 5  # cut where the model ends
    assert model.config.model_type == {"bert": "bert", "modern": "modernbert"}[architecture]
    if architecture == "modern":
        do_what_the_docs_do(out, monkeypatch)
    capfd.readouterr()
    assert main(command) == 0
    told = capfd.readouterr().out
    assert told.startswith(f"already finished: see {out / 'exported' / 'README.md'}")
    assert told.count("\n") == 1
    run = out / "run" / "run_0"
    assert_it_is_finished_without_the_gpu_of_its_training(command, out, monkeypatch)
    ended = (run / "outcome.json").read_text()
    (run / "outcome.json").write_text(ended.replace('"success"', '"aborted"'))
    assert pretrain._finish(run, out / "data", out / "other") == 3
    assert "training diverged, so no model is exported" in capfd.readouterr().err
    assert not (out / "other").exists()


@pytest.mark.longest
def test_a_stopped_one_goes_on_by_the_line_that_it_prints(tmp_path):
    text, out = write_letters(tmp_path / "text"), tmp_path / "out"
    command = ["pretrain", str(text), "--out", str(out), *SMALL]
    command += ["--set", "schedule.decay_steps=60", "--set", "run.log_interval_steps=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlperf_bert", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while "step 3/60" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 75, rest
    (hint,) = re.findall(r"^to resume: (.*)$", rest, re.MULTILINE)
    assert not (out / "exported").exists()
    done = run_process("bash", "-c", hint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is already prepared with these settings" in done.stdout
    assert "step 1/60" not in done.stdout
    assert "60 steps of 32 sequences" in (out / "exported" / "README.md").read_text()
