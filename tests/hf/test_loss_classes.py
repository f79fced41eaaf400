"""The losses of the classes of transformers: the same step in any split, or rejected, as the documentation says."""

import re
from pathlib import Path

import pytest
import tiny_classes
from marks import thinned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses-of-transformers.md"
FAMILY_OF = tiny_classes.classes()
QUICK = [
    "BertForMaskedLM", "BertForMultipleChoice", "BertForPreTraining",
    "BertForQuestionAnswering", "BertForTokenClassification", "CLIPModel", "LlamaForCausalLM",
    "LlavaForConditionalGeneration", "MixtralForCausalLM", "MusicgenForCausalLM", "T5ForConditionalGeneration",
    "ViTForImageClassification", "ViTForMaskedImageModeling", "Wav2Vec2ForCTC", "XLNetLMHeadModel",
]  # fmt: skip


def documented() -> dict[str, str]:
    """Return the verdict on each class in the tables of the page."""
    verdicts = dict[str, str]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\| .* \| (right|rejected|batch|not tried) \| (.*) \|", line):
            verdicts |= dict.fromkeys(re.findall(r"`(\w+)`", match[2]), match[1])
    return verdicts


VERDICTS = documented()
TRIED = [name for name, verdict in VERDICTS.items() if verdict != "not tried" and name in FAMILY_OF]


@pytest.mark.parametrize("name", thinned(TRIED, QUICK))
def test_class_trains_as_documented(name: str) -> None:
    try:
        verdict = tiny_classes.verdict(name, FAMILY_OF[name])
    except tiny_classes.NotTried as error:
        pytest.skip(f"this version of transformers has another {name}: {error}")
    assert verdict == VERDICTS[name]


def test_quick_classes_are_documented() -> None:
    assert not set(QUICK) - set(TRIED)
