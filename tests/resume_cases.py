"""Short runs in this process, which begin anew or go on."""

import shutil

from mlperf_bert.__main__ import main
from support import prepare_small, sets_of

MISSED = 3
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
# Of three layers two see a window; attention drops nothing, as published.
MODERN = (
    *("model.architecture=modern", "model.objective=mlm", "model.num_layers=3"),
    *("model.attention_window=8", "model.attention_dropout=0"),
)


def run_train(config, data, directory, *settings, resume=None, extra=()):
    """The status of a run into `directory`."""
    sets = sets_of(*settings)
    if resume is not None:
        extra = (*extra, "--resume", str(resume))
    places = ["--data", str(data), "--run-dir", str(directory)]
    return main(["train", "--config", str(config), *places, *sets, *extra])


def weights(directory):
    return _saved(directory, "model")


def random_streams(directory):
    """Torch's, which only kernels of others draw from: losses and weights need not show them."""
    return _saved(directory, "rank_states")


def _saved(directory, what):
    last = max(directory.glob("run_0/checkpoints/step_*"))
    return (last / f"{what}.safetensors").read_bytes()


def with_other_train(synthetic_data, directory):
    """A copy of the data whose training set has the same sizes and other masks."""
    shutil.copytree(synthetic_data, directory)
    shutil.rmtree(directory / "train")
    sizes = {"max_seq_length": 32, "max_predictions": 5, "dupe_factor": 2, "seed": 1}
    texts, words = [directory / "train.txt"], directory / "words.txt"
    prepare_small(texts, words, directory / "train", **sizes)
    return directory
