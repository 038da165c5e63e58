"""Turn a .gguf file into a Hugging Face folder: python -m chairlift_client.convert FILE FOLDER."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Write bf16 weights, tokenizer, chat template and generation config.

    The file gives no generation config, so the ids at which an answer ends come from its tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(
            0o644
        )  # weights are written for their owner alone, a container's user is another


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
