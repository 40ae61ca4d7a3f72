"""LiteLLM: completion, stream, and a Router that falls back to a model with a longer context."""

from __future__ import annotations

import litellm
from checks import LONGER_URL, MODEL, URL, check

litellm.telemetry = False
hello = [{"role": "user", "content": "Hello"}]
document = [{"role": "user", "content": "The sky is blue. " * 2000}]
here = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0}
there = {**here, "api_base": f"{LONGER_URL}/v1"}

answer = litellm.completion(**here, messages=hello)
check("completion", answer.usage.completion_tokens > 0, f"{answer.usage.total_tokens} tokens")

chunks = list(litellm.completion(**here, messages=hello, stream=True))
check("completion, streamed", len(chunks) > 1, f"{len(chunks)} chunks")

try:
    litellm.completion(**here, messages=document)
    refused = ""
except litellm.ContextWindowExceededError as error:
    refused = str(error).partition(" However")[0].rpartition(" - ")[2]
check("an over-long prompt is a ContextWindowExceededError", refused, refused)

router = litellm.Router(
    model_list=[
        {"model_name": "small", "litellm_params": here},
        {"model_name": "large", "litellm_params": there},
    ],
    context_window_fallbacks=[{"small": ["large"]}],
    num_retries=0,
)
tokens = router.completion(model="small", messages=document).usage.prompt_tokens
check("context_window_fallbacks fires", tokens > 4096, f"{tokens} prompt tokens")
