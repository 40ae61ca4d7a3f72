"""/v1/chat/completions: request parsing and answer format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.serving.answer import AnswerHeader, ChoiceAnswer
from headway.serving.answer_pieces import TextPiece
from headway.serving.context import ServerContext
from headway.serving.generation_job import GenerationJob, RequestContext, build_job, prepared_context, read_model
from headway.serving.journaled_request import Kind
from headway.serving.logprobs import ScoredToken, chat_logprobs
from headway.serving.prompts import PromptReader, TokenPrompt
from headway.serving.request_bodies import ChatBody, TokenizeBody, read_body
from headway.serving.sampling_fields import sampling_params


def parse_chat(fields: Mapping[str, Any], context: RequestContext, prompts: PromptReader) -> GenerationJob:
    """Validate a body and render its messages. Without an output limit the answer may fill the context.

    Raises RequestError or ApiError that names the field at fault.
    """
    read_model(fields, context.models)
    body = read_body(ChatBody, fields)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    max_tokens, length_field = _max_tokens(body)
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=body.top_logprobs if body.logprobs else None,
        vocab_size=context.info.vocab_size,
    )
    # The model's files may name only the end of a document; the template's end of a turn ends a chat's answer.
    ends = tuple(token for token in prompts.turn_end if token not in context.info.eos_token_ids)
    if ends and not body.ignore_eos:
        params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    prepared = prepared_context(body, context)
    messages = body.messages if prepared is None else prepared.before(body.messages)
    prompt = render_prompt(body, messages, prompts)
    return build_job(body, context, (prompt,), params, length_field)


def render_prompt(
    body: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]], prompts: PromptReader
) -> TokenPrompt:
    """Put messages through the chat template and the tokenizer; the template writes special tokens itself."""
    return prompts.chat(messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs)


def _max_tokens(body: ChatBody) -> tuple[int | None, str | None]:
    """Return the output limit and the field that set it; None for both when there is none."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, None if body.max_tokens is None else "max_tokens"


class ChatFormat:
    """Objects of type `chat.completion` and `chat.completion.chunk`."""

    kind: Kind = "chat"

    def __init__(self, job: GenerationJob, server: ServerContext, request_id: str) -> None:
        self.job = job
        self._tokenizer = server.tokenizer
        self._header = AnswerHeader.of("chatcmpl", request_id, job.model)
        # The OpenAI API: with include_usage every chunk but the last has `"usage": null`.
        self._null_usage: dict[str, Any] = {"usage": None} if job.include_usage else {}
        # Choices whose first chunk was made.
        self._begun: set[int] = set()

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """Return one object for the piece; before the first piece, one that has the role."""
        # The OpenAI API: the first chunk of a stream has the role and no content.
        first = () if index in self._begun else (self._chunk(self._opening(index)),)
        self._begun.add(index)
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece.scored),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self.job.text.return_token_ids:
            choice["token_ids"] = piece.tokens
        return (*first, self._chunk(choice))

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return an object with usage and without choices."""
        return self._header.object("chat.completion.chunk", [], usage=usage)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for index, one in enumerate(answers):
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(one.text), "refusal": None},
                "logprobs": self._logprobs(one.scored),
                "finish_reason": one.finish,
                "stop_reason": one.stop_reason,
            }
            if self.job.text.return_token_ids:
                choice["token_ids"] = one.tokens
            choices.append(choice)
        return self._header.object("chat.completion", choices, usage=usage)

    def _opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._header.object("chat.completion.chunk", [choice], **self._null_usage)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return None if self.job.params.logprobs is None else chat_logprobs(scored, self._tokenizer)
