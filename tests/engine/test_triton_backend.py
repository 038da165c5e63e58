"""The engine on the Triton-lang kernels, in the interpreter: equal to transformers' ``generate``.

Float32 and tiny, with prompts around the edges of blocks and windows. The same tests run on a GPU,
where the graphs are CUDA's own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift import loader
from chairlift.backends import TritonAttention
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from chairlift.request import SamplingParams
from tests.engine.harness import Harness, Oracle
from tests.engine.replayed import Recorder
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, build

WINDOW = 8
LENGTHS = (1, 8, 17)
NUM_TOKENS = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


class Tiny(NamedTuple):
    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[list[int]]
    oracle: Oracle


# Sliding window with soft-capping, q/k norms, head sizes and ratios of their own.
@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    options = dict(FAMILIES[request.param])
    if "sliding_window" in options:
        options["sliding_window"] = WINDOW
    return _tiny(build(tmp_path_factory.mktemp("models"), request.param, **options))


def _tiny(folder: Path) -> Tiny:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    oracle = Oracle(model.eval())
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    expected = [oracle.generate(prompt, NUM_TOKENS) for prompt in prompts]
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="triton"))
    assert loaded.kernels is not None and loaded.kernels.kind is TritonAttention
    return Tiny(loaded, prompts, expected, oracle)


SETTINGS = {"num_kv_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 12}


# With graphs, prompts and steps that fit no shape run as they are, too; the interpreter is slow.
@pytest.mark.parametrize(
    ("tiny", "graphs"), [("llama", False), ("gemma2", True), ("qwen3", True)], indirect=["tiny"]
)
def test_equal_to_generate(tiny: Tiny, graphs: bool) -> None:
    """Chunked prompts, mixed steps, decodes; with graphs most decodes are replays."""
    recorder = Recorder() if graphs and not torch.cuda.is_available() else None
    ahead = "on" if graphs else "off"
    harness = Harness(tiny.loaded, recorder, one_step_ahead=ahead, **SETTINGS)
    answers = harness.generate(tiny.prompts, PARAMS)
    for prompt, tokens, expected in zip(tiny.prompts, answers, tiny.expected, strict=True):
        tiny.oracle.check_against(prompt, tokens, expected)
    if recorder is not None:
        assert recorder.num_replays >= NUM_TOKENS - 2
