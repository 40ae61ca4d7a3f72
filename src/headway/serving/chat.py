"""/v1/chat/completions: parsing and wording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.errors import RequestError
from headway.serving.answer import AnswerHeader, ChoiceAnswer
from headway.serving.body_fields import BodyFields
from headway.serving.context import ServerContext
from headway.serving.generation import TextPiece
from headway.serving.generation_job import GenerationJob, RequestContext, build_job, read_model, refuse_unsupported
from headway.serving.journaled_request import Kind
from headway.serving.logprobs import ScoredToken, chat_logprobs
from headway.serving.messages import read_messages
from headway.serving.prompts import PromptReader, TokenPrompt
from headway.serving.sampling_fields import MAX_LOGPROBS, read_sampling


def parse_chat(fields: BodyFields, asker: RequestContext, prompts: PromptReader) -> GenerationJob:
    """Raises RequestError or ApiError that names the field at fault. No output limit means: what is left."""
    model = read_model(fields, asker.models)
    refuse_unsupported(fields)
    for name in ("tools", "functions"):
        fields.refuse(name, ([],), "tools do not exist here")
    for name in ("tool_choice", "function_call"):
        fields.refuse(name, ("none", "auto"), "tools do not exist here")
    fields.refuse("modalities", (["text"],), "only text")
    fields.refuse("audio", (), "only text")
    fields.refuse("chat_template", (), "templates come with the model")
    fields.refuse("continue_final_message", (False,), "use /v1/completions to continue text")
    max_tokens, length_field = _max_tokens(fields)
    params = read_sampling(fields, max_tokens=max_tokens, logprobs=_logprobs(fields), vocab_size=asker.info.vocab_size)
    return build_job(fields, asker, model, (render_prompt(fields, prompts),), params, length_field)


def render_prompt(fields: BodyFields, prompts: PromptReader) -> TokenPrompt:
    """The messages through the chat template and the tokenizer; the template writes special tokens itself."""
    variables = fields.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise RequestError("'chat_template_kwargs' must be an object", "chat_template_kwargs")
    return prompts.chat(
        read_messages(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        variables=variables,
    )


def _max_tokens(fields: BodyFields) -> tuple[int | None, str | None]:
    """The newer spelling wins; None when the client left it open."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.integer(name, 1, 2**31 - 1)
        if value is not None:
            return value, name
    return None, None


def _logprobs(fields: BodyFields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return (top or 0) if wanted else None


class ChatFormat:
    """Objects of type `chat.completion` and `chat.completion.chunk`."""

    kind: Kind = "chat"

    def __init__(self, job: GenerationJob, server: ServerContext, request_id: str) -> None:
        self.job = job
        self._tokenizer = server.tokenizer
        self._header = AnswerHeader.of("chatcmpl", request_id, job.model)
        self._null_usage: dict[str, Any] = {"usage": None} if job.include_usage else {}
        self._begun = False

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """One object a piece; before the first, one that names the role."""
        first = () if self._begun else (self._chunk(self._opening(index)),)
        self._begun = True
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

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """No choices, only usage."""
        return self._header.object("chat.completion.chunk", [], usage=usage)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, int]) -> dict[str, Any]:
        """The one choice."""
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
