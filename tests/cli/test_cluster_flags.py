"""`headway cluster --dry-run`: a faulty file is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.refusals import refusal

from headway.cli.main import main

TWO_HOSTS = "pools: [{role: prefill}, {role: decode, host: 1}]\nplacement: fixed-sp\noptions: {sp: 1}\n"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run loads nothing, and says `loaded`."""
    monkeypatch.setattr("headway.runtime.assembly.dry_run.cluster_report", lambda *_: ["loaded"])


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ("pools: [{}, {host: 2}]", (), "there is a host 2, but no pool says `host: 1`"),
        (TWO_HOSTS, ("--standby", "true"), "pools[0]: standby is for instances that are all on one host"),
        ("pools: [{}]\nworkload: {qps: -1}", (), "workload: qps must be above 0, not -1"),
        ("pools: [{}]", ("--nnodes", "2"), "nnodes spreads the workers of one engine; in a cluster a pool says `host`"),
    ],
)
def test_a_faulty_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, flags: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    assert words in refusal(["cluster", str(path), "--dry-run", *flags], capsys)


@pytest.mark.usefixtures("loaded")
def test_more_instances_than_cores_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.serving.serve_settings.CORES", (0, 1))
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: [{count: 900}]\nplacement: jsq\n")
    assert main(["cluster", str(path), "--dry-run"]) == 0
    assert "warning: 900 instances of host 0 have 900 threads on 2 cores" in capsys.readouterr().out
    path.write_text("pools: [{count: 2}]\nplacement: jsq\n")
    assert main(["cluster", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out == "loaded\n"


@pytest.mark.usefixtures("loaded")
def test_two_hosts_are_tried_without_ray_and_not_served_without_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_HOSTS)
    assert main(["cluster", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out == "loaded\n"
    assert "several hosts need --ray-address" in refusal(["cluster", str(path)], capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--foo",), "unrecognized arguments: --foo"),
        (("--config", "x"), "unrecognized arguments: --config x"),
        (
            ("--max-model-length", "8k"),
            "unrecognized arguments: --max-model-length 8k; --max-model-length: did you mean --max-model-len?",
        ),
        (("--tensor-parallel", "2"), "unrecognized arguments: --tensor-parallel 2; --tensor-parallel: did you mean"),
        (("--dry-run", "--replay", "log"), "argument --replay: not allowed with argument --dry-run"),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_flag_that_is_spelt_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", str(tmp_path / "cluster.yaml"), *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"headway cluster: error: {words}")
    assert said.endswith("(`headway cluster --help` lists what there is)\n")
    assert said.count("\n") == 1


def test_a_dry_run_names_idle_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.assembly.dry_run.loaded", lambda config: None)
    monkeypatch.setattr(
        "headway.runtime.assembly.dry_run.described", lambda core, prefills: ["prefills" if prefills else "decodes"]
    )
    for name in ("measurement", "cluster_plan", "groups"):
        monkeypatch.setattr(f"headway.runtime.assembly.dry_run.{name}", lambda *_: [])
    path = tmp_path / "cluster.yaml"
    for placement, idle in (("fifo", True), ("fixed-sp", False)):
        size = "long_sp" if placement == "fifo" else "sp"
        path.write_text(f"pools: [{{}}, {{role: decode, host: 1}}]\nplacement: {placement}\noptions: {{{size}: 1}}\n")
        assert main(["cluster", str(path), "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "threads each\n  loaded on this host: what fits on host 1 may differ\ndecodes\n" in said
        assert ("pools[1] is of role decode and does nothing: fifo decodes where it prefills" in said) == idle


def test_a_flag_that_is_cut_short_is_answered_with_the_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--tensor-par", "2"])
    assert ended.value.code == 2
    assert "--tensor-par: did you mean --tensor-parallel-size?" in capsys.readouterr().err
    # A letter is missing.
    with pytest.raises(SystemExit):
        main(["serve", "--tensor-paralel-size", "2"])
    assert "did you mean --tensor-parallel-size?" in capsys.readouterr().err


def test_a_flag_of_vllm_s_is_answered_with_the_command_that_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "model", "--engine", "vllm"])
    assert "`vllm serve MODEL --scheduler-cls headway.vllm.Scheduler`" in capsys.readouterr().err
