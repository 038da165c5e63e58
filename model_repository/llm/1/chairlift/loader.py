"""From a hub id, a folder, or a GGUF file to a checked model, its tokenizer, and its limits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from . import attention
from .attention import AttentionOptions, LayerShape
from .attention_torch import TorchAttention
from .backends import Kernels, make_backend, open_kernels
from .config import EngineConfig
from .direct_forward import shortest_forward
from .forward import Forward, through_model
from .fusion import FusionReport, fuse
from .model_checks import (
    UnsupportedModel,
    check_architecture,
    check_attention,
    check_class,
    context_length,
    end_tokens,
)
from .rotary import settle_rotary
from .self_check import TOLERANCE, Subject, difference, own_logits, paged_logits
from .shape_probe import probe

logger = logging.getLogger(__name__)

__all__ = ["LoadedModel", "UnsupportedModel", "load"]

GGUF_SINCE = Version("5.6")  # up to 5.5 most files were read with CodeLlama's tokenizer


class LoadedModel(NamedTuple):
    """A model in evaluation mode that calls our attention, and what the engine must know of it.

    ``layers`` and ``options`` are indexed by attention layer; ``vocab_size`` is the width of the
    logits, ``eos_ids`` every end token; ``fusion`` is None where nothing was to be fused.
    ``forward`` is the way to run a step.
    """

    model: Any
    forward: Forward
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    layers: list[LayerShape]
    options: list[AttentionOptions]
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None
    fusion: FusionReport | None


class Source(NamedTuple):
    """A name for ``from_pretrained``, and the keywords that every part of it is read with."""

    name: str
    options: dict[str, Any]

    @property
    def is_gguf(self) -> bool:
        return "gguf_file" in self.options


def resolve_source(config: EngineConfig) -> Source:
    """Folders and hub ids are transformers' own; a ``.gguf`` file lies in one of the two."""
    options: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    if not config.model.endswith(".gguf"):
        return Source(config.model, options)
    if Version(transformers.__version__) < GGUF_SINCE:
        raise UnsupportedModel(
            f"GGUF files need transformers {GGUF_SINCE}, not {transformers.__version__}, whose "
            "tokenizers put a BOS token before every prompt, whatever the file says"
        )
    path = Path(config.model)
    if path.is_file():
        return Source(str(path.parent), {**options, "gguf_file": path.name})
    if path.is_absolute() or path.parent.is_dir() or len(path.parts) < 3:
        raise UnsupportedModel(f"model: no such GGUF file: {config.model}")
    repository, file = "/".join(path.parts[:2]), "/".join(path.parts[2:])
    return Source(repository, {**options, "gguf_file": file})


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel(f"device is '{name}', but torch finds no GPU")
    if device.type == "cuda" and device.index:
        # Triton-lang launches on the thread's current device, which is the first in every thread.
        raise UnsupportedModel(
            f"device is '{name}': the first visible GPU is used; CUDA_VISIBLE_DEVICES="
            f"{device.index} in the server's environment makes that another one"
        )
    return device


def load(config: EngineConfig) -> LoadedModel:
    """Load and check; raises ``UnsupportedModel`` with the reason where it can't be served."""
    attention.register()
    source = resolve_source(config)
    with _without_progress_bars():
        hf_config = _read(AutoConfig, source, source.name)
        check_architecture(hf_config)
        context_length(hf_config, config.max_model_len)
        tokenizer = _load_tokenizer(config, source)
        template = _chat_template(config, tokenizer)
        if config.fused_modules:
            loaded = _load_model(config, source, tokenizer, template, fused=True)
            if loaded is not None:
                return loaded
        loaded = _load_model(config, source, tokenizer, template, fused=False)
    assert loaded is not None
    return loaded


def _load_model(
    config: EngineConfig, source: Source, tokenizer: Any, template: str | None, *, fused: bool
) -> LoadedModel | None:
    """None if the model answers otherwise once it is fused; without fusion that is refused."""
    device = pick_device(config.device)
    model = _read_model(config, source, device)
    max_model_len = context_length(model.config, config.max_model_len)
    for kind in settle_rotary(model, max_model_len):
        logger.info("%s rotary embedding: as for %d tokens, in all requests", kind, max_model_len)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    layers, options = probe(model, device)
    check_attention(model, options, max_model_len)
    subject = Subject(model, layers, vocab_size, model.dtype, device)
    kernels = open_kernels(config, device, model.dtype)
    with torch.inference_mode():
        wanted = _checked_logits(subject)
        report = None
        if fused and kernels is not None:
            report = fuse(model, kernels.ops, lambda: make_backend(kernels), layers, options)
            logger.info("%s", report.summary())
        if kernels is not None and not _serves(subject, kernels, wanted, fused=fused):
            return None
        forward = through_model(model)
        if report is not None and kernels is not None:
            forward = shortest_forward(subject, lambda: make_backend(kernels), max_model_len)
    return LoadedModel(
        model=model,
        forward=forward,
        tokenizer=tokenizer,
        chat_template=template,
        layers=layers,
        options=options,
        eos_ids=end_tokens(model.generation_config, model.config, tokenizer, vocab_size),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype=model.dtype,
        device=device,
        kernels=kernels,
        fusion=report,
    )


def _checked_logits(subject: Subject) -> list[torch.Tensor]:
    """Those of transformers, after the reference backend agreed with them."""
    wanted = own_logits(subject)
    if not all(step.isfinite().all() for step in wanted):
        logger.warning(
            "logits overflow in %s on trial input; such requests end with an error", subject.dtype
        )
    forward = through_model(subject.model)
    error = difference(wanted, paged_logits(subject, TorchAttention(), forward))
    if not error <= TOLERANCE[subject.dtype]:
        raise UnsupportedModel(
            f"{type(subject.model).__name__} can't be served from a paged cache: on trial input "
            f"its logits differ by {error:.2g} from transformers' own"
        )
    return wanted


def _serves(subject: Subject, kernels: Kernels, wanted: list[torch.Tensor], fused: bool) -> bool:
    try:
        forward = through_model(subject.model)
        error = difference(wanted, paged_logits(subject, make_backend(kernels), forward))
        failure = None if error <= TOLERANCE[subject.dtype] else f"logits differ by {error:.2g}"
    except Exception as raised:
        failure = f"{type(raised).__name__}: {raised}"
    if failure is None:
        return True
    if not fused:
        raise UnsupportedModel(
            f"{type(subject.model).__name__} does not work with these kernels ({failure}); "
            "set attention_backend to 'torch'"
        )
    logger.warning("loading again without fused modules, which do not serve it: %s", failure)
    return False


def _read_model(config: EngineConfig, source: Source, device: torch.device) -> Any:
    """Weights go straight to the device; a checkpoint that lacks some is refused."""
    options = source.options
    if source.is_gguf and hasattr(transformers, "GgufConfig"):
        options = {**options, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model, info = _read(
        AutoModelForCausalLM,
        Source(source.name, options),
        source.name,
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        attn_implementation=attention.INTERFACE_NAME,
        device_map={"": device},
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise UnsupportedModel(
            f"{source.name} has no weights that fit for {len(missing)} parameters of "
            f"{type(model).__name__}: {', '.join(missing[:3])}"
        )
    check_class(type(model))
    return model.eval().requires_grad_(False)


def _read(auto_class: Any, source: Source, name: str, **options: Any) -> Any:
    """transformers' errors for what isn't there, or isn't allowed, as one line."""
    try:
        return auto_class.from_pretrained(name, **source.options, **options)
    except UnsupportedModel:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())
        raise UnsupportedModel(f"model '{name}' can't be loaded: {text}") from error


def _load_tokenizer(config: EngineConfig, source: Source) -> PreTrainedTokenizerBase:
    name = source.name
    if config.tokenizer is not None:
        name = config.tokenizer
        source = Source(name, {k: v for k, v in source.options.items() if k != "gguf_file"})
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, source, name)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedModel(
            f"{type(tokenizer).__name__} is not a fast tokenizer; name another with 'tokenizer'"
        )
    return tokenizer


def _chat_template(config: EngineConfig, tokenizer: Any) -> str | None:
    """The setting (a file or the template itself), else the checkpoint's."""
    if config.chat_template is None:
        template = tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template
    if "{" in config.chat_template:
        return config.chat_template
    path = Path(config.chat_template)
    if not path.is_file():
        raise ValueError(f"setting 'chat_template': no such file: {config.chat_template}")
    return path.read_text()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A server's log is no terminal."""
    bars: Any = transformers_logging  # has no types
    gguf_reader: Any = modeling_gguf_pytorch_utils
    loading, downloading = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bars.disable_progress_bar()
    disable_progress_bars()
    shown = gguf_reader.tqdm  # heeds no setting
    gguf_reader.tqdm = partial(shown, disable=True)
    try:
        yield
    finally:
        gguf_reader.tqdm = shown
        if loading:
            bars.enable_progress_bar()
        if downloading:
            enable_progress_bars()
