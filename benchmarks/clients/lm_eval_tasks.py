"""EleutherAI's lm-eval: generate_until, loglikelihood and loglikelihood_rolling, against what transformers computes.

The tasks read `texts.jsonl` of the scratch folder, which the runner wrote with `expected.json` (`reference_values`).
"""

from __future__ import annotations

import json
from pathlib import Path

from checks import MODEL, SCRATCH, TOKENIZER, URL, check, run_tool

NEAR = 1e-4
"""Most relative difference of two perplexities."""

arguments = {
    "model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": TOKENIZER, "tokenizer_backend": "huggingface",
    "tokenized_requests": "True", "num_concurrent": "2", "max_length": "2048", "max_retries": "1",
}  # fmt: skip
run_tool(
    "lm_eval", "run", "--model", "local-completions",
    "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
    "--include_path", str(Path(__file__).parent / "lm_eval_tasks"),
    "--tasks", "headway_generate,headway_continuation,headway_text", "--output_path", str(SCRATCH / "out"),
)  # fmt: skip
(file,) = (SCRATCH / "out").rglob("results_*.json")
results = json.loads(file.read_text())["results"]
expected = json.loads((SCRATCH / "expected.json").read_text())

same = results["headway_generate"]["exact_match,none"]
check("generate_until: greedy texts of transformers'", same == 1.0, f"{same:.0%} equal")
for task, metric in (("headway_continuation", "perplexity"), ("headway_text", "word_perplexity")):
    got, want = results[task][f"{metric},none"], expected[task]
    what = "loglikelihood" if task == "headway_continuation" else "loglikelihood_rolling"
    check(
        f"{what}: perplexity equals transformers'",
        abs(got / want - 1) < NEAR,
        f"{got:.4f} against {want:.4f}, apart by {abs(got / want - 1):.1e}",
    )
