"""Names of our parameters in TensorFlow's BERT: exactly those in MLCommons' own rule files."""

import re
from pathlib import Path

import pytest
import torch
from mlperf_logging import compliance_checker
from model_cases import TINY

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name

META = torch.device("meta")
RULES = Path(compliance_checker.__file__).parent


@pytest.mark.parametrize("ruleset", ["1.1.0", "2.0.0", "2.1.0"])
def test_bert_large_has_the_tensors_of_the_rules(ruleset: str) -> None:
    rules = (RULES / f"training_{ruleset}" / "closed_bert.yaml").read_text()
    asked_for = re.findall(r'"((?:bert|cls)/[^"]+)"', rules)
    ours = [tensorflow_name(name) for name in BertForPretraining(ModelSection(), META).state_dict()]
    assert len(asked_for) == 398
    assert sorted(ours) == sorted(asked_for)


def test_a_kernel_is_what_tensorflow_multiplies_from_the_right() -> None:
    modules = dict(BertForPretraining(TINY, META).named_modules())
    kernels = {
        f"{name}.weight" for name, module in modules.items() if isinstance(module, torch.nn.Linear)
    }
    kernels.remove("cls.seq_relationship.weight")  # stored as we do, and transposed when used
    for name in BertForPretraining(TINY, META).state_dict():
        assert tensorflow_name(name).endswith("/kernel") == (name in kernels)


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'step'"):
        tensorflow_name("step")
