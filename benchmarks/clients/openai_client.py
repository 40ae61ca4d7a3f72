"""The OpenAI package: chats, completions, streams, models, responses, and the error of a bad field."""

from __future__ import annotations

import openai
from checks import MODEL, URL, check

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
hello = [{"role": "user", "content": "Hello"}]

chat = client.chat.completions.create(model=MODEL, messages=hello, max_tokens=8, n=2, logprobs=True, temperature=0)
check("chat, n=2", len(chat.choices) == 2 and chat.usage.completion_tokens > 0, f"{chat.usage.total_tokens} tokens")
check("logprobs", len(chat.choices[0].logprobs.content) > 0, f"{chat.choices[0].logprobs.content[0].logprob:.3f}")

stream = client.chat.completions.create(
    model=MODEL, messages=hello, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
check("chat, streamed", chunks[-1].usage.completion_tokens > 0, f"{len(chunks)} chunks")

text = client.completions.create(model=MODEL, prompt="Hello", max_tokens=8, echo=True, temperature=0)
check("completion with echo", text.choices[0].text.startswith("Hello"), text.choices[0].finish_reason)

names = [model.id for model in client.models.list()]
check("models.list, models.retrieve", client.models.retrieve(MODEL).id in names, names[0])

response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, temperature=0)
check("responses.create", response.usage.output_tokens > 0, response.status)

try:
    client.chat.completions.create(model=MODEL, messages=hello, temperature=9)
    field, message = None, "the request was accepted"
except openai.BadRequestError as error:
    field, message = error.param, error.body["message"]
check("BadRequestError names the field", field == "temperature", message)
