"""OpenVINO GenAI's ContinuousBatchingPipeline over a model exported by optimum-intel.

1,024 tokens a step was its best for workload A on the machine on which it was chosen; prefix
caching is on, as in the other engines. Its KV cache is u8 unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai
from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve


class OpenVino:
    def __init__(self, settings: Settings) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 1024
        scheduler.max_num_seqs = 256
        scheduler.cache_size = 4
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        for name, value in settings.options.get("scheduler", {}).items():
            setattr(scheduler, name, value)
        properties = {
            "INFERENCE_NUM_THREADS": settings.threads,
            **settings.options.get("properties", {}),
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(settings.options["folder"]), scheduler, "CPU", properties
        )
        self._num_requests = 0

    def versions(self) -> dict[str, str]:
        return package_versions("openvino-genai", "openvino", "optimum-intel")

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        handles = [self._add(request) for request in requests]
        answers = [Answer() for _ in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = clock()
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.add(now, list(output.generated_ids))
        return answers

    def _add(self, request: Request) -> genai.GenerationHandle:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        prompt = ov.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, prompt, config)


def make(settings: Settings) -> PeerEngine:
    return OpenVino(settings)


if __name__ == "__main__":
    serve(make)
