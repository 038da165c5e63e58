"""The one exception that is a client's answer; its codes are Triton's own error codes by name."""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """Names equal those of ``pb_utils.TritonError``; HTTP shows 400, 400, 503, 501, 500, 400."""

    INVALID_ARG = "INVALID_ARG"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"


class RequestError(Exception):
    """One request is answered with this and nothing else is disturbed."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_ARG) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
