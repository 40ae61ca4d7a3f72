from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.present import present

from headway.sim.workload import TraceError, TraceRequest
from headway.sim.workload.traces import PromptText, TextPiece, read_trace, shared_tokens

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 30000, "input_length": 7322, "output_length": 490, "hash_ids": [0]}\n'
)
AGENTS = (
    "conv,agent,seq,t_s,input_tokens,output_tokens,cached_prefix_tokens,api_time_s,think_time_s,type\n"
    "1,0,0,0,71175,169,0,7.34,0,n\n1,0,1,19,72762,296,71168,,12,n\n2,0,0,5,100,0,0,1,0,s\n"
)
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3742,284,4026,0.07\n18,243,261,13.5\n"
OURS = "arrival_s,prompt_tokens,output_tokens,class,cached_tokens,session\n3,10,5,long,4,s1\n1.5,20,6,,,\n"
OURS_JSON = '{"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 3, "class": "x"}\n\n'


def write(folder: Path, text: str, name: str = "trace") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_azure_traces_are_read(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE))
    assert trace.format == "azure"
    assert trace.requests[0] == TraceRequest(0.0, 374, 44)
    assert trace.requests[1].arrival_s == pytest.approx(4.314579, abs=2e-7)


def test_mooncake_in_milliseconds_from_zero(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.format == "mooncake"
    assert [r.arrival_s for r in trace.requests] == [0.0, 3.0]


def test_agents_keep_each_sessions_own_clock(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AGENTS))
    assert trace.session_clock
    second = trace.requests[1]
    assert (second.arrival_s, second.prompt_tokens, second.session, second.thread) == (5.0, 100, "2", "0")
    assert second.think_s == 0.0
    assert (trace.requests[2].cached_tokens, trace.requests[2].think_s) == (71168, 12.0)


def test_hash_ids_become_keys_of_blocks_of_any_size(tmp_path: Path) -> None:
    first, second = (present(request.text) for request in read_trace(write(tmp_path, MOONCAKE)).requests)
    assert first.tokens == 1024
    assert first.keys(512)[:1] == second.keys(512)
    assert len(first.keys(64)) == 16
    assert first.keys(64)[:8] == second.keys(64)
    assert len(set(first.keys(100))) == 10
    assert first.keys(100)[:5] == second.keys(100)


@pytest.mark.parametrize(
    ("given", "wrong", "problem"),
    [
        ("[0, 1]", "[0, -1]", "hash_ids must be whole numbers"),
        ("[0, 1]", "[0, 1.5]", "hash_ids must be whole numbers"),
        ("[0, 1]", '"x"', "hash_ids is 'x', not a list"),
        ("27000", "true", "timestamp is True, not a time"),
    ],
)
def test_a_wrong_value_names_the_line_and_the_column(tmp_path: Path, given: str, wrong: str, problem: str) -> None:
    with pytest.raises(TraceError, match=f":1: {problem}"):
        read_trace(write(tmp_path, MOONCAKE.replace(given, wrong)))


def test_a_sessions_prompts_begin_as_its_cached_tokens_say(tmp_path: Path) -> None:
    first, _, second = (present(request.text) for request in read_trace(write(tmp_path, AGENTS)).requests)
    # 71,175 tokens and their answer of 169 come again; the trace counts whole blocks of 64
    assert first.keys(64) == second.keys(64)[: 71344 // 64]
    assert second.keys(64)[71344 // 64 :][0] not in first.keys(64)


@pytest.mark.parametrize("cached", [100, 106, 160, 500])
def test_a_turn_whose_cached_tokens_hold_the_answer_before_it_repeats_both(tmp_path: Path, cached: int) -> None:
    """Servers count generated tokens as cached, too; more than there was is what there was."""
    rows = f"0,100,60,chat,0,s\n2,600,5,chat,{cached},s\n"
    first, second = read_trace(write(tmp_path, OURS.splitlines()[0] + "\n" + rows)).requests
    assert shared_tokens([first, second], 4) == 160


def test_vidur_with_and_without_arrivals(tmp_path: Path) -> None:
    assert not read_trace(write(tmp_path, VIDUR)).has_arrivals
    trace = read_trace(write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n1.0,5,6\n2.5,7,8\n"))
    assert trace.has_arrivals
    assert trace.requests[1].arrival_s == 1.5


def test_headway_traces_are_sorted_and_have_optional_columns(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, OURS))
    text = PromptText((TextPiece(10, 2),))
    assert trace.requests == (TraceRequest(0.0, 20, 6), TraceRequest(1.5, 10, 5, "long", 4, "s1", text=text))
    assert read_trace(write(tmp_path, OURS_JSON)).requests == (TraceRequest(0.0, 7, 3, "x"),)


def test_bailian_has_seconds_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    rows = (
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 9, '
        '"type": "text", "turn": 1, "hash_ids": [7, 8, 9]}\n'
        '{"chat_id": 2, "timestamp": 63.0, "input_length": 20, "output_length": 9, "type": "file", '
        '"hash_ids": [7, 5]}\n'
    )
    trace = read_trace(write(tmp_path, rows))
    first, second = trace.requests
    assert (trace.format, first.arrival_s, second.arrival_s) == ("bailian", 0.0, 1.5)
    assert (first.klass, second.klass) == ("text", "file")
    keys = [present(one.text).keys(16) for one in (first, second)]
    assert keys[0][:1] == keys[1][:1]
    assert len(keys[0]) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "burstgpt",
            ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API\n"
             "7.5,GPT-4,1087,230,1317,Conversation log\n"),
        ),
        (
            "servegen",
            ('{"timestamp": 5.0, "input_tokens": 472, "output_tokens": 18}\n'
             '{"timestamp": 7.5, "input_tokens": 1087, "output_tokens": 230}\n'),
        ),
        (
            "headway",
            ('[{"arrival_s": 5, "prompt_tokens": 472, "output_tokens": 18}, '
             '{"arrival_s": 7.5, "prompt_tokens": 1087, "output_tokens": 230}]'),
        ),
        (
            "azure",
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 02:00:00.5+02:00,472,18\n"
             "2024-05-10T00:00:03Z,1087,230\n"),
        ),
    ],
)  # fmt: skip
def test_other_formats_are_read(tmp_path: Path, name: str, text: str) -> None:
    trace = read_trace(write(tmp_path, text))
    assert (trace.format, trace.requests) == (name, (TraceRequest(0.0, 472, 18), TraceRequest(2.5, 1087, 230)))


def test_an_agents_session_is_read_with_its_subagents_as_threads(tmp_path: Path) -> None:
    session = """{
  "id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
  "requests": [
    {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 5, "hash_ids": [1, 2]},
    {"t": 9.0, "type": "subagent", "agent_id": "a1", "subagent_type": "Explore", "status": "completed",
     "requests": [{"t": 0.5, "type": "s", "model": "m", "in": 64, "out": 2, "hash_ids": [9]}], "models": ["m"]},
    {"t": 12.0, "type": "s", "model": "m", "in": 200, "out": 7, "hash_ids": [1, 2, 3], "think_time": 1.5}
  ]
}
"""
    trace = read_trace(write(tmp_path, session))
    assert (trace.format, trace.session_clock) == ("weka", True)
    first, inner, last = trace.requests
    assert (first.arrival_s, inner.arrival_s, last.arrival_s) == (0.0, 9.5, 12.0)
    assert (first.session, inner.thread, last.thread, last.think_s) == ("s", "a1", "", 1.5)
    assert present(first.text).keys(64)[:2] == present(last.text).keys(64)[:2]
    # In a file of several sessions the same id is another block.
    line = session.replace("\n", " ") + "\n"
    both = read_trace(write(tmp_path, line + line.replace('"s"', '"t"', 1))).requests
    one, other = (set(present(each.text).keys(64)) for each in both if each.prompt_tokens == 130)
    assert not one & other


def test_conversations_are_requests_whose_lengths_are_estimates(tmp_path: Path) -> None:
    turns = [("human", "x" * 40), ("gpt", "y" * 20), ("human", "z" * 8), ("gpt", "w" * 4)]
    rows = [{"id": "c", "conversations": [{"from": who, "value": text} for who, text in turns]}]
    trace = read_trace(write(tmp_path, json.dumps(rows)))
    assert (trace.format, trace.has_arrivals) == ("sharegpt", False)
    assert [(r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in trace.requests] == [(10, 5, 0), (17, 1, 15)]


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"timestamp": [61.5, 63.0], "input_length": [40, 20], "output_length": [9, 8], "chat_id": [1, 2],
             "hash_ids": [[7, 8, 9], [7, 5]]}  # fmt: skip
    parquet.write_table(pyarrow.table(table), tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert (trace.format, trace.requests[1].prompt_tokens, trace.requests[1].arrival_s) == ("bailian", 20, 1.5)


def test_gzip_is_recognised_by_magic_bytes_not_by_name(tmp_path: Path) -> None:
    file = tmp_path / "packed"
    file.write_bytes(gzip.compress(AZURE.encode()))
    assert len(read_trace(file).requests) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no requests", "expected the columns"]),
        ("arrival_s,prompt_tokens,output_tokens,cached_tokens\n1,5,3,6\n", [":2:", "cached_tokens is 6, above"]),
        ("arrival_s,prompt_tokens,output_tokens,think_s\n1,5,3,-3\n", [":2:", "think_s is -3: a request cannot"]),
        ("arrival_s,prompt_tokens,output_tokens,prompt_tokens\n1,5,3,6\n", [":1:", "'prompt_tokens' is there 2 times"]),
        (
            '{"timestamp": 1, "timestamp": 2, "input_length": 1, "output_length": 1}\n',
            ["'timestamp' is repeated"],
        ),
        (
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n',
            [":1:", "are 1 blocks of 512"],
        ),
        ('[{"id": "a", "conversations": [{"from": "human", "value": "hi"}]}]', ["holds no requests"]),
        ('[{"id": "a", "conversations": [{"from": "human", "value": 5}]}]', [":1: not a session"]),
        ('{"id": "a", "block_size": 0, "requests": [{"t": 0, "in": 5, "out": 1}]}', [":1: not a session"]),
        ('{"arrival_s": ' + "[" * 100_000, [":1: not a JSON object"]),
        ("[" * 100_000, ["not a JSON array"]),
        ('{"arrival_s": 0, "prompt_tokens": ' + "9" * 5000 + "}", [":1: not a JSON object"]),
        ("a," * 600_000, [":1: a line of more than", "is no request"]),
        (",".join(f"c{n}" for n in range(50_000)) + "\n" + "1," * 49_999 + "1\n", [":2: unknown columns (c0, c1"]),
        ("a,b\n1,2\n", [":2:", "unknown columns (a, b)", "ContextTokens", "input_length"]),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", [":2:", "2 cells under 3 columns"]),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,x,3\n", [":3:", "'x'", "output_tokens"]),
        ("arrival_s,prompt_tokens,output_tokens\n1,-2,3\n", [":2:", "prompt_tokens is '-2'"]),
        ("arrival_s,prompt_tokens,output_tokens\n1,2.5,3\n", [":2:", "2.5"]),
        ("arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", [":2:", "arrival_s"]),
        ("arrival_s,prompt_tokens,output_tokens\n1,inf,3\n", [":2:", "prompt_tokens"]),
        (OURS_JSON + "{broken\n", [":3:", "not a JSON object"]),
        (OURS_JSON + '{"arrival_s": 1}\n', [":3:", "'prompt_tokens' is missing"]),
        (OURS_JSON + '{"arrival_s": 1, "prompt_tokens": null, "output_tokens": 1}\n', [":3:"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", [":2:", "yesterday"]),
        ("arrival_s,prompt_tokens,output_tokens,class\n1,2,3,all\n", [":2:", "another name"]),
    ],
)
def test_errors_name_file_line_and_columns(tmp_path: Path, text: str, words: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert all(word in str(caught.value) for word in [str(file), *words]), str(caught.value)


def test_missing_files_wrong_formats_and_torn_archives(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="unknown trace format 'xml'"):
        read_trace(write(tmp_path, AZURE), "xml")
    with pytest.raises(TraceError, match="mooncake traces need the columns timestamp"):
        read_trace(write(tmp_path, AZURE), "mooncake")
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(AZURE.encode() * 50)[:60])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(torn)


@pytest.mark.parametrize(
    ("name", "kind", "count", "longest"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv.gz", "azure", 19366, 14050),
        ("mooncake-conversation/conversation_0-2400s.jsonl.gz", "mooncake", 7851, 124847),
        ("claude-code-weka/requests.csv.gz", "agents", 40550, 894371),
        ("sharegpt-lengths/sharegpt_val_10k_llama2.csv.gz", "vidur", 10000, 3973),
    ],
)
def test_public_traces_are_read_completely(traces: Path, name: str, kind: str, count: int, longest: int) -> None:
    trace = read_trace(traces / name)
    assert (trace.format, len(trace.requests)) == (kind, count)
    assert max(request.prompt_tokens for request in trace.requests) == longest


def test_a_request_holds_python_s_numbers_where_a_table_gave_numpy_s() -> None:
    request = TraceRequest(np.float64(1.5), np.int64(500), np.int32(10))
    kinds = [type(number) for number in (request.arrival_s, request.prompt_tokens, request.output_tokens)]
    assert kinds == [float, int, int]
    assert request == TraceRequest(1.5, 500, 10)
