"""LangChain's ChatOpenAI: invoke, stream, batch, and structured output."""

from __future__ import annotations

import openai
from checks import MODEL, URL, check
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=16, temperature=0)

answer = model.invoke("Hello")
check("invoke", answer.usage_metadata["output_tokens"] > 0, f"{answer.usage_metadata['total_tokens']} tokens")

pieces = list(model.stream("Hello"))
check("stream", "".join(piece.content for piece in pieces) == answer.content, f"{len(pieces)} pieces, the same text")

answers = model.batch(["Hello", "Good morning"])
check("batch", len(answers) == 2, f"{len(answers)} answers")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


try:
    person = model.with_structured_output(Person, method="json_schema").invoke("Anna is 31.")
    message = f"an answer, {person}"
except openai.BadRequestError as error:
    message = error.body["message"]
check("structured output is refused, with a way to have it", "vllm serve" in message, message)
