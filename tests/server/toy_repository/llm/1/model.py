"""A model without a language model: numbered words, one thread per request, a real heartbeat.

Settings (CHAIRLIFT_SETTINGS): `token_seconds` between words, `freeze_on` a prompt after which the
heartbeat stops, `break_on` a prompt after which the engine calls itself unhealthy.
"""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        settings = json.loads(os.environ["CHAIRLIFT_SETTINGS"])
        self.token_seconds = float(settings.get("token_seconds", 0.001))
        self.freeze_on = settings.get("freeze_on")
        self.break_on = settings.get("break_on")
        self.control = Path(os.environ["CHAIRLIFT_CONTROL_DIR"])
        self.running = 0
        self.cancelled = 0
        self.state = "serving"
        self.drain_deadline = None
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.heart = threading.Thread(target=self.beat)
        self.heart.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            prompt = self.value(request, "text_input") or self.value(request, "messages")
            count = int(self.value(request, "max_tokens") or 16)
            if self.state != "serving":
                self.refuse(sender, "the server is draining", pb_utils.TritonError.UNAVAILABLE)
            elif prompt is None:
                self.refuse(sender, "text_input is required", pb_utils.TritonError.INVALID_ARG)
            else:
                with self.lock:
                    self.running += 1
                stream = bool(self.value(request, "stream"))
                args = (sender, prompt.decode(), count, stream)
                threading.Thread(target=self.answer, args=args).start()

    def answer(self, sender, prompt, count, stream):
        if prompt == self.break_on:
            self.state = "unhealthy"
        if prompt == self.freeze_on:
            self.closing.set()
        if prompt == "cancelled?":
            self.send(sender, str(self.cancelled), True)
        else:
            self.words(sender, count, stream)
        with self.lock:
            self.running -= 1

    def words(self, sender, count, stream):
        words = [f"word{i} " for i in range(count)]
        for i, word in enumerate(words):
            time.sleep(self.token_seconds)
            if sender.is_cancelled():
                self.cancelled += 1
                return self.refuse(sender, "cancelled", pb_utils.TritonError.CANCELLED)
            if self.drain_deadline is not None and time.monotonic() > self.drain_deadline:
                return self.refuse(sender, "drain limit", pb_utils.TritonError.UNAVAILABLE)
            if stream:
                self.send(sender, word, i + 1 == count)
        if not stream:
            self.send(sender, "".join(words), True)

    def send(self, sender, text, final):
        tensor = pb_utils.Tensor("text_output", np.array([[text.encode()]], dtype=np.object_))
        reason = pb_utils.Tensor(
            "finish_reason", np.array([[b"length" if final else b"None"]], dtype=np.object_)
        )
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        sender.send(pb_utils.InferenceResponse([tensor, reason]), flags=flags)

    def refuse(self, sender, text, code):
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def value(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy().ravel()[0]

    def beat(self):
        while not self.closing.wait(0.1):
            if self.state == "serving" and (self.control / "drain").exists():
                limit = float((self.control / "drain").read_text())
                self.drain_deadline = time.monotonic() + limit
                self.state = "draining"
            if self.state == "draining" and self.running == 0:
                self.state = "drained"
            beat = {
                "time": time.time(),
                "state": self.state,
                "running": self.running,
                "waiting": 0,
                "pid": os.getpid(),
            }
            (self.control / "heartbeat.new").write_text(json.dumps(beat))
            (self.control / "heartbeat.new").replace(self.control / "heartbeat")

    def finalize(self):
        self.closing.set()
        self.heart.join()
