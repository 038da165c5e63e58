"""Models for the engine's tests: SmolLM2 in float32, and real English prompts."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from chairlift_client.models import prepare_default_model
from tests.engine.harness import Oracle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return prepare_default_model(ROOT / "models", Console())


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> LoadedModel:
    return loader.load(EngineConfig(model=str(smollm2_dir), dtype="float32"))


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_dir: Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval())


@pytest.fixture(scope="session")
def english(smollm2: LoadedModel) -> list[int]:
    """Token ids of a long English text, to cut prompts from."""
    text = "\n".join(topics[name] for name in sorted(topics)[:40])
    tokenizer: Any = smollm2.tokenizer
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
