"""Today's recipe learns: sequences of an easy language, masked anew each time at 30 %."""

from pathlib import Path

from easy_text import MAX_SEQ_LENGTH, VOCAB_SIZE, make_easy_data
from mlperf_bert.data.index import LengthIndex
from resume_cases import run_train
from support import metrics_records

TARGET = 0.5
CONFIG = f"""
[run]
max_steps = 600
seed = 1
device = "cpu"
[model]
vocab_size = {VOCAB_SIZE}
hidden_size = 64
num_layers = 2
num_heads = 4
intermediate_size = 128
max_position_embeddings = {MAX_SEQ_LENGTH}
hidden_dropout = 0.0
attention_dropout = 0.0
initializer_range = 0.1
objective = "mlm"
[data]
max_seq_length = {MAX_SEQ_LENGTH}
max_predictions = 7
masking = "dynamic"
masking_rate = 0.3
[parallel]
local_batch_size = 32
[optim]
name = "adamw"
learning_rate = 4e-3
[schedule]
warmup_steps = 50
decay_steps = 600
[eval]
target_accuracy = {TARGET}
interval_samples = 1600
[checkpoint]
save = "never"
"""


def test_it_reaches_far_more_than_any_guess(tmp_path: Path) -> None:
    data = make_easy_data(tmp_path, "single")
    config = tmp_path / "encoder.toml"
    config.write_text(CONFIG, encoding="utf-8")
    assert run_train(config, data, tmp_path / "run") == 0
    rows = metrics_records(tmp_path / "run")
    baseline = LengthIndex.open(data / "eval").manifest.baseline
    assert baseline is not None and baseline.context_free_accuracy < TARGET / 3
    assert rows[-1]["mlm_accuracy"] >= TARGET
    assert rows[-1]["step"] < 600
