"""The folder by which server and commands talk: `drain` and `profile` in, `heartbeat` out."""

import json
from pathlib import Path
from typing import NamedTuple

CONTROL_VARIABLE = "CHAIRLIFT_CONTROL_DIR"


class Step(NamedTuple):
    """One step of the engine."""

    decodes: int
    prompt_tokens: int
    milliseconds: float


class Heartbeat(NamedTuple):
    """What the engine last said of itself; `time` (Unix) is when its loop last turned."""

    time: float
    state: str
    running: int
    waiting: int
    pid: int
    steps: tuple[Step, ...] = ()


class ControlDir:
    """One server's control folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self) -> None:
        """Make the folder and forget what an earlier server left in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("drain", "heartbeat"):
            (self.path / name).unlink(missing_ok=True)

    def request_drain(self, timeout: float) -> None:
        """Tell the engine to admit nothing more and to finish what runs within so many seconds."""
        partial = self.path / "drain.new"
        partial.write_text(f"{timeout}\n")
        partial.replace(self.path / "drain")

    def request_profile(self, steps: int) -> None:
        """Tell the engine to profile its next steps; `finished_profile` will name the result."""
        (self.path / "profile-done").unlink(missing_ok=True)
        (self.path / "profile.new").write_text(f"{steps}\n")
        (self.path / "profile.new").replace(self.path / "profile")

    def switch_trace(self, wanted: str) -> None:
        """Tell the engine to record its steps from now on ("on"), or to write them down ("off")."""
        (self.path / "trace-done").unlink(missing_ok=True)
        (self.path / "trace.new").write_text(wanted)
        (self.path / "trace.new").replace(self.path / "trace")

    def finished_trace(self) -> Path | None:
        """The file that the recording was written to, or None as long as it was not."""
        try:
            return Path((self.path / "trace-done").read_text())
        except FileNotFoundError:
            return None

    def finished_profile(self) -> Path | None:
        """The folder that the ordered profile was written to, or None as long as it was not."""
        try:
            return Path((self.path / "profile-done").read_text())
        except FileNotFoundError:
            return None

    def heartbeat(self) -> Heartbeat | None:
        """The engine's last heartbeat, or None before the first."""
        try:
            raw = json.loads((self.path / "heartbeat").read_text())
            return Heartbeat(
                time=float(raw["time"]),
                state=str(raw["state"]),
                running=int(raw.get("running", 0)),
                waiting=int(raw.get("waiting", 0)),
                pid=int(raw["pid"]),
                steps=tuple(Step(*step) for step in raw.get("steps", ())),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def process_is_alive(pid: int) -> bool:
    """Whether a process still runs; a zombie, which the server may leave unreaped, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
