"""NVIDIA's AIPerf: streamed chats of synthetic text, and the server's metrics beside them."""

from __future__ import annotations

import json
import os

from checks import MODEL, SCRATCH, TOKENIZER, URL, check, run_tool

# Offline, AIPerf takes the tokenizer's folder for the name of a hub's.
os.environ.pop("HF_HUB_OFFLINE", None)
run_tool(
    "aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming",
    "--tokenizer", TOKENIZER, "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
    "--request-count", "8", "--concurrency", "2", "--prompt-input-tokens-mean", "200",
    "--prompt-output-tokens-mean", "16", "--random-seed", "1", "--workers-max", "1", "--ui", "none",
    "--no-gpu-telemetry", "--output-artifact-dir", str(SCRATCH / "aiperf"),
)  # fmt: skip
profile = json.loads((SCRATCH / "aiperf" / "profile_export_aiperf.json").read_text())
done, tokens = profile["request_count"]["avg"], profile["total_output_tokens"]["avg"]
check("profile", (done, tokens) == (8, 128), f"{done:.0f} requests, {tokens:.0f} output tokens")
metrics = json.loads((SCRATCH / "aiperf" / "server_metrics_export.json").read_text())["metrics"]
ours = [name for name in metrics if name.startswith("headway")]
check("server metrics", ours, f"{len(metrics)} metrics of /metrics")
