"""GuideLLM, one request after another: chats of synthetic text."""

from __future__ import annotations

import json

from checks import MODEL, SCRATCH, TOKENIZER, URL, check, run_tool

run_tool(
    "guidellm", "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}",
    "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=5",
    "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
    "--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=16",
    "--output", f"kind=json,path={SCRATCH / 'guidellm.json'}", "--disable-console",
)  # fmt: skip
(benchmark,) = json.loads((SCRATCH / "guidellm.json").read_text())["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
tokens = benchmark["metrics"]["output_token_count"]["successful"]["total_sum"]
lost = {kind: [each["info"] for each in benchmark["requests"][kind]] for kind in ("errored", "incomplete")}
done = totals["successful"], tokens
said = f"{done[0]} requests, {done[1]:.0f} output tokens"
check("run", done == (5, 80), said if done == (5, 80) else f"{said}; {lost}; totals {totals}")
