"""`headway why --url` prints what `--log` prints of the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.live_feeds import log_page, logged_events

from headway.cli.main import main


@pytest.fixture(scope="module", name="address")
def _address() -> Iterator[str]:
    with log_page() as address:
        yield address


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("why") / "log"
    file.write_text("".join(json.dumps(event) + "\n" for event in logged_events()))
    return file


@pytest.mark.parametrize("more", [[], ["--under", "fcfs", "--under", "edf,t_target_ms=100"]])
@pytest.mark.parametrize("request_id", ["r0", "r3"])
def test_a_running_server_explains_as_its_log_does(
    address: str, log: Path, request_id: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, files = [], []
    for number, source in enumerate((["--log", str(log)], ["--url", address])):
        file = tmp_path / f"{number}.json"
        assert main(["why", request_id, *source, *more, "--json", str(file)]) == 0
        told.append(capsys.readouterr().out)
        files.append(json.loads(file.read_bytes()))
    assert told[0] == told[1]
    assert "First token after" in told[0]
    assert ("Simulated with the same requests" in told[0]) == bool(more)
    assert files[0]["causes_of_ttft"] == pytest.approx(files[1]["causes_of_ttft"])


def test_a_picture_of_a_running_servers_request(address: str, tmp_path: Path) -> None:
    assert main(["why", "r3", "--url", address, "--picture", str(tmp_path / "why.png")]) == 0
    assert (tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (["--url", "{address}"], "the server refuses it: 'r99': the log has no such request"),
        (["--url", "{address}/other"], "the server answers 404 Not Found"),
        (["--url", "127.0.0.1:8000"], "write it like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1"], "is a server there?"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    address: str, source: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "r99", *(part.format(address=address) for part in source)]) != 0
    error = capsys.readouterr().err
    assert error.startswith("headway: error: ")
    assert said in error
    assert error.count("\n") == 1
