"""`headway doctor`: findings on this machine, and what is said where something is missing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from headway.cli import doctor as m
from headway.cli.main import main
from headway.runtime.attention import native


def test_doctor_prints_one_line_a_finding_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--port", "0"]) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["headway"]["state"] == "ok"
    assert found["compiled kernels"]["what"]
    assert all(
        one["advice"] or one["state"] != "limited" or one["subject"] == "compiled kernels" for one in found.values()
    )
    assert main(["doctor", "--port", "0"]) == 0
    shown = capsys.readouterr().out
    assert all(subject in shown for subject in found)


def test_kernels_that_are_off_say_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "0")
    from headway.runtime.attention.native import kernels

    kernels.cache_clear()
    assert main(["doctor", "--json", "--port", "0"]) == 0
    kernels.cache_clear()
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["compiled kernels"]["state"] == "limited"
    assert "HEADWAY_NATIVE=0" in found["compiled kernels"]["what"]


@pytest.mark.long
@pytest.mark.skipif(native.general_kernels(torch.float32) is None, reason="needs a C++ compiler and AVX2")
@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ('case "$*" in *bf16_*) echo no such instruction >&2; exit 1;; esac; exec g++ "$@"', "no such instruction"),
        ('exec g++ "$@" -U__AVX512BF16__', "the compiler does not know AVX-512 BF16"),
    ],
)
def test_kernels_that_do_not_compile_are_no_want_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, why: str
) -> None:
    older = tmp_path / "older-g++"
    older.write_text(f"#!/bin/sh\n{compiler}\n")
    older.chmod(0o755)
    monkeypatch.setenv("CXX", str(older))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # On any processor: nothing that needs these instructions comes to be run.
    monkeypatch.setattr(native, "isa", lambda: "avx512_bf16")
    for cached in (native.kernels, native.general_kernels):
        cached.cache_clear()
    (found,) = (one for one in m.findings(0) if one.subject == "compiled kernels")
    for cached in (native.kernels, native.general_kernels):
        cached.cache_clear()
    assert (found.state, found.advice) == ("limited", "install g++ 12 or later, then try again")
    assert found.what.startswith("on; bf16 is computed in fp32: ")
    assert found.what.endswith(why)


def test_port_in_use_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = m.port_finding(taken.getsockname()[1])
        assert (found.state, found.advice) == ("fault", "headway serve --port N")
        # A server would not start there: scripts can tell.
        monkeypatch.setattr(m, "findings", lambda port: iter([found]))
        assert [main(["doctor", *words]) for words in ((), ("--json",))] == [1, 1]
    assert capsys.readouterr().out.startswith("✗ port  ")


def test_processor_without_bf16_units_gets_advice() -> None:
    assert "float32" in m.processor_finding(frozenset({"avx2"})).advice
    assert m.processor_finding(frozenset({"avx2", "avx512f", "avx512_bf16"})).state == "ok"


def test_little_memory_is_limited() -> None:
    assert m.memory_finding(1 << 30).state == "limited"


def test_port_out_of_range_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["doctor"], ["watch", "no.jsonl"]):
        for port in ("70000", "-1"):
            assert main([*command, "--port", port]) == 2
            assert capsys.readouterr().err == f"headway: error: --port {port}: a port is 0 to 65535\n"
