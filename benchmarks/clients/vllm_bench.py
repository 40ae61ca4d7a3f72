"""vLLM's own load generator, `vllm bench serve`, on completions and on chats."""

from __future__ import annotations

import json

from checks import MODEL, SCRATCH, TOKENIZER, URL, check, run_tool

for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    run_tool(
        "vllm", "bench", "serve", "--backend", backend, "--base-url", URL, "--endpoint", path, "--model", MODEL,
        "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "16",
        "--num-prompts", "8", "--request-rate", "4", "--ignore-eos", "--save-result", "--result-filename",
        f"{backend}.json", "--percentile-metrics", "ttft,tpot,itl,e2el",
    )  # fmt: skip
    result = json.loads((SCRATCH / f"{backend}.json").read_text())
    done, tokens = result["completed"], result["total_output_tokens"]
    check(f"--backend {backend}", (done, tokens) == (8, 128), f"{done} requests, {tokens} output tokens")
