"""Triton's administration is closed with a key, unless it was asked for open."""

import stat
from pathlib import Path

from chairlift_client.admin import KEY_FILE, make_key, restrictions
from chairlift_client.server_files import ServerFiles
from chairlift_client.settings import ServeSettings
from chairlift_client.triton_process import server_command


def test_each_start_makes_a_key_that_only_its_user_reads(tmp_path: Path) -> None:
    first, second = make_key(tmp_path), make_key(tmp_path)
    assert first != second and len(second) >= 32
    path = tmp_path / KEY_FILE
    assert path.read_text() == second
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_key_closes_administration_and_nothing_else() -> None:
    http, grpc = restrictions("k3y")
    closed, _, secret = http.removeprefix("--http-restricted-api=").partition(":")
    assert set(closed.split(",")) == {"model-repository", "shared-memory", "logging", "trace"}
    assert secret == "chairlift-admin-key=k3y"
    assert grpc == http.replace("--http-restricted-api", "--grpc-restricted-protocol")


def test_command_line_closes_where_there_is_a_key() -> None:
    settings = ServeSettings(repository=Path("/models"), server_args=("--x=y",))
    files = ServerFiles(Path("tritonserver"), None, {})
    closed = server_command(settings, files, "p", "k3y")
    assert closed[-3:] == [*restrictions("k3y"), "--x=y"]
    assert not [a for a in server_command(settings, files, "p") if "restricted" in a]
