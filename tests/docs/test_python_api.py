"""The Python API: the page that documents it runs as it stands, its exports are true, and it stays lazy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headway
from headway import LLM, SamplingParams, Scenario, chunk_size, fitted_latency, load_scenario, simulate
from headway.core.errors import ConfigError, RequestError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "python-api.md"


def test_every_block_of_the_python_api_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, Any] = {}
    for block in blocks:
        assert len(block.splitlines()) <= 17
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "84213" in printed
    assert "417" in printed
    assert re.search(r"\('document', \d+\)", printed)


def test_importing_headway_brings_nothing_along() -> None:
    code = (
        "import sys, headway; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch','numpy','pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = "import sys; from headway import simulate, chunk_size, Scheduler; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_public_name_resolves_and_the_stub_file_lists_the_same_names() -> None:
    exported = {name: getattr(headway, name) for name in headway.__all__}  # type: ignore[attr-defined]
    assert all(value is not None for value in exported.values())
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        headway.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    stub = ast.parse(Path(headway.__file__).with_suffix(".pyi").read_text())
    listed = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert listed == headway._PUBLIC  # type: ignore[attr-defined]
    assert set(dir(headway)) == set(headway.__all__)  # type: ignore[attr-defined]


WORKLOAD = {"workload": {"mix": [{"prompt": "fixed:500", "output": "fixed:5"}], "qps": 2.0, "requests": 10}}


def test_a_simulation_is_the_same_from_a_mapping_a_scenario_and_a_file(tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(WORKLOAD))
    scenario = load_scenario(WORKLOAD)
    assert isinstance(scenario, Scenario)
    results = [simulate(source, seed=3) for source in (WORKLOAD, scenario, file, str(file))]
    assert all(result.to_json() == results[0].to_json() for result in results)
    assert results[0].to_json() != simulate(WORKLOAD, seed=4).to_json()


def test_fields_are_set_by_dotted_name_on_every_kind_of_source() -> None:
    for source in (WORKLOAD, load_scenario(WORKLOAD)):
        result = simulate(source, fields={"workload.requests": 3, "policy.policy": "fcfs"})
        assert len(result.rows()) == 3
        assert result.scenario.policy.policy == "fcfs"
        assert result.summary()["all"]["requests"] == 3


def test_a_faulty_scenario_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        simulate(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="wrkload is not a field"):
        simulate({"wrkload": {}})


def test_a_frame_has_a_row_a_request_and_a_column_a_field() -> None:
    result = simulate(WORKLOAD)
    frame = result.frame()
    assert list(frame.columns) == list(result.rows()[0])
    assert frame.to_dict("records") == result.rows()
    assert frame.groupby("class")["ttft_s"].max().to_dict() == {"short": max(row["ttft_s"] for row in result.rows())}
    assert str(frame["ttft_s"].dtype) == "float64"


def test_a_frame_without_pandas_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in their place: an import then fails as where it is not installed.
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"frame\(\) needs pandas, which is not installed; rows\(\) has the same"):
        simulate(WORKLOAD).frame()


def test_a_chunk_is_the_largest_that_fits_the_budget() -> None:
    latency = fitted_latency("a100-80gb", "llama-3-8b")
    chunk = chunk_size(latency, 0.05, cached_tokens=50_000, decodes=8, decode_context=1_000)
    assert chunk.tokens > 0
    assert chunk.batch_s <= 0.05
    more = chunk_size(latency, 0.06, cached_tokens=50_000, decodes=8, decode_context=1_000)
    assert more.tokens > chunk.tokens
    assert chunk_size(latency, 0.0).tokens == 0
    with pytest.raises(ConfigError, match="negative"):
        chunk_size(latency, 0.05, decodes=-1)


@pytest.fixture(scope="module")
def llm() -> None:
    with LLM(max_model_len=2048, threads=1) as one:
        yield one


GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_a_batch_of_prompts_gives_each_prompt_the_tokens_that_it_gets_alone(llm: LLM) -> None:
    prompts = [f"The passkey is {key}. Remember it.\nThe passkey is" for key in (4711, 90210, 33)]
    together = llm.generate(prompts, GREEDY)
    assert [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts] == [one.token_ids for one in together]
    assert "4711" in together[0].text
    assert all(one.finish_reason in ("stop", "length") and 0 < one.ttft_s <= one.e2e_s for one in together)
    ids = llm.generate(llm.encode(prompts[0]), GREEDY)[0]
    assert ids.token_ids == together[0].token_ids


def test_sampling_parameters_are_per_prompt_and_a_seed_repeats_itself(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=7, ignore_eos=True, logprobs=2) for n in (3, 5)]
    first = llm.generate(["one", "two"], params)
    assert [len(one.token_ids) for one in first] == [3, 5]
    assert [len(one.logprobs) for one in first] == [3, 5]
    assert [one.token_ids for one in llm.generate(["one", "two"], params)] == [one.token_ids for one in first]
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate(["one", "two"], params[:1])


def test_a_prompt_is_scored_token_by_token(llm: LLM) -> None:
    (answer,) = llm.generate(["The passkey is 417."], [SamplingParams(max_tokens=1, prompt_logprobs=0)])
    # the first token has nothing before it
    assert len(answer.prompt_logprobs) == answer.prompt_tokens - 1
    assert llm.generate("The passkey is 417.", SamplingParams(max_tokens=1))[0].prompt_logprobs == []


def test_a_refused_prompt_leaves_an_empty_engine(llm: LLM) -> None:
    with pytest.raises(RequestError, match="at most"):
        llm.generate(["short", "x " * 3000], GREEDY)
    with pytest.raises(RequestError, match="token ids"):
        llm.generate([[5, 10**9]], GREEDY)
    with pytest.raises(RequestError, match="token ids"):
        llm.generate([[5, 10**12]], GREEDY)
    assert llm.generate("ok", GREEDY)[0].finish_reason is not None


def test_an_llm_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in its place: an import then fails as where it is not installed.
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"^LLM\(\) needs tokenizers: pip install 'headway\[serve\]'$"):
        LLM(max_model_len=512)


def test_a_closed_llm_refuses_to_generate() -> None:
    one = LLM(max_model_len=512, threads=1)
    one.close()
    one.close()
    with pytest.raises(ConfigError, match="closed"):
        one.generate("x")
    with pytest.raises(ConfigError, match="not a folder"):
        LLM("no-such-folder")
