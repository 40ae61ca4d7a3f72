"""The model that a command serves: a folder, a hub id in the local cache, from a flag, the environment or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.command_parser import CommandParser
from headway.cli.serve import StartSettings, add_arguments, run, settings_of
from headway.core.errors import ConfigError
from headway.serving.launch import model_folder


def hub_cache(folder: Path, name: str, commit: str = "a" * 40, branch: str = "main") -> Path:
    """A hub cache as the Hugging Face library lays it out, with one model of one file."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / branch).write_text(commit)
    return snapshot


def settings(*words: str) -> StartSettings:
    parser = CommandParser(prog="headway serve")
    add_arguments(parser)
    return settings_of(parser.parse_args(words))


@pytest.mark.parametrize("name", ["org/tiny-llama", "gpt2"])
def test_a_hub_id_loads_from_the_local_cache(name: str, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, name)
    assert Path(model_folder(name, download_dir=str(tmp_path))) == snapshot


def test_a_revision_is_a_branch_or_a_commit(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, "org/m", "b" * 40, "v2")
    for revision in ("v2", "b" * 40):
        assert Path(model_folder("org/m", revision, str(tmp_path))) == snapshot
    with pytest.raises(ConfigError, match=r"cache at revision v3, .* run `hf download org/m --revision v3`"):
        model_folder("org/m", "v3", str(tmp_path))


def test_a_hub_id_that_is_not_in_the_cache_gets_one_sentence_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^org/m is neither a folder nor a model .*run `hf download org/m`, or give"):
        model_folder("org/m", download_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such", "./here", "a/b/c", "x y"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        model_folder(name)


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/m").mkdir(parents=True)
    assert model_folder("org/m") == "org/m"


def test_the_model_may_stand_in_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: of-file\n")
    assert settings("--config", str(file)).model == "of-file"
    monkeypatch.setenv("HEADWAY_MODEL", "of-environment")
    assert settings("--config", str(file)).model == "of-environment"
    assert settings("of-word", "--config", str(file)).model == "of-word"
    assert settings("--model", "of-flag").model == "of-flag"


def test_two_models_and_a_model_among_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^two models are named: a and --model b$"):
        settings("a", "--model", "b")
    with pytest.raises(ConfigError, match=r"takes all the words after it \(a ./m\): put MODEL before it"):
        settings("--served-model-name", "a", "./m")


def test_the_embedded_model_goes_by_the_name_that_it_is_served_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_folder("headway-embedded") == model_folder(None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headway-embedded").mkdir()
    assert model_folder("headway-embedded") == "headway-embedded"


def test_a_dry_run_reads_the_chat_template_that_serving_would(tmp_path: Path) -> None:
    parser = CommandParser(prog="headway serve")
    add_arguments(parser)
    words = ["--dry-run", "--latency-profile", "quick", "--chat-template", str(tmp_path / "none.jinja")]
    with pytest.raises(ConfigError, match=r"chat template .*none\.jinja does not exist"):
        run(parser.parse_args(words))
