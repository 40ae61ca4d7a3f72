"""The request and answer formats of /v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, WithJsonSchema

from headway.core.errors import RequestError
from headway.serving.answer import (
    AnswerHeader,
    ChoiceAnswer,
    ScoredToken,
    TextPiece,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from headway.serving.context import ServerContext
from headway.serving.jobs import (
    GenerationJob,
    PromptReader,
    RequestContext,
    TokenPrompt,
    build_job,
    prepared_context,
    read_model,
)
from headway.serving.journal import Kind
from headway.serving.request_bodies import (
    MAX_LOGPROBS,
    NO_STRUCTURE,
    NO_TOOLS,
    ChatBody,
    CompletionBody,
    RequestBody,
    TokenizeBody,
    Unsupported,
    kind,
    read_body,
    sampling_params,
    without_nulls,
)


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
        defaults=prompts.tokenizer.sampling_defaults,
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
        return (*first, self._chunk(self._choice(index, "delta", {"content": piece.text}, piece)))

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return an object with usage and without choices."""
        return self._header.object("chat.completion.chunk", [], usage=usage)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for index, piece in enumerate(answer.joined() for answer in answers):
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append(self._choice(index, "message", message, piece))
        return self._header.object("chat.completion", choices, usage=usage)

    def _choice(self, index: int, field: str, content: dict[str, Any], piece: TextPiece) -> dict[str, Any]:
        wanted = self.job.params.logprobs is not None
        choice: dict[str, Any] = {
            "index": index,
            field: content,
            "logprobs": chat_logprobs(piece.scored, self._tokenizer) if wanted else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self.job.text.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._header.object("chat.completion.chunk", [choice], **self._null_usage)


# /v1/completions: request parsing and answer format. A batch of prompts is answered as choices 0, 1, ...

WHOLE_LAYOUT = "tp1-pp1-kvp1"
"""Layout of an engine of one worker, not in a cluster."""
DEFAULT_MAX_TOKENS = 16
"""Output limit of a request that sets none, as in the OpenAI API."""


def parse_completion(fields: Mapping[str, Any], context: RequestContext, prompts: PromptReader) -> GenerationJob:
    """Validate a body and read its prompts. Raises RequestError or ApiError that names the field at fault."""
    read_model(fields, context.models)
    body = read_body(CompletionBody, fields)
    # With echo, `logprobs` is of the prompt's tokens too.
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(body.logprobs, scored or 0)
    if scored is not None:
        _check_scoring(context, "echo" if body.prompt_logprobs is None else "prompt_logprobs")
    elif body.echo and context.settings.journal is not None:
        _check_scoring(context, "echo")
    if body.max_tokens == 0 and not body.echo and scored is None:
        raise RequestError("'max_tokens' 0 needs 'echo' or 'prompt_logprobs': the answer would be empty", "max_tokens")
    params = sampling_params(
        body,
        # One token is computed all the same, and left out of the answer.
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        logprobs=body.logprobs,
        vocab_size=context.info.vocab_size,
        defaults=prompts.tokenizer.sampling_defaults,
        prompt_logprobs=scored,
    )
    prepared = prepared_context(body, context)
    prompt = body.prompt if prepared is None else prepared.continued(body.prompt)
    tokens = prompts.read(prompt, add_special_tokens=body.add_special_tokens)
    return build_job(body, context, tokens, params, "max_tokens")


def _check_scoring(context: RequestContext, field: str) -> None:
    """Raise RequestError where a prompt's log-probabilities cannot be had, or would be lost by a restart."""
    if context.info.layout != WHOLE_LAYOUT:
        raise RequestError(
            f"'{field}' needs the logits of the prompt, which an engine of one worker reports: {context.info.layout} "
            "does not",
            field,
        )
    if context.settings.journal is not None:
        raise RequestError(f"'{field}' is not supported by a server with a journal, which does not keep it", field)


class CompletionFormat:
    """Objects of type `text_completion`."""

    kind: Kind = "completion"

    def __init__(self, job: GenerationJob, server: ServerContext, request_id: str) -> None:
        self.job = job
        self._tokenizer = server.tokenizer
        self._header = AnswerHeader.of("cmpl", request_id, job.model)
        # The OpenAI API: with include_usage every chunk but the last has `"usage": null`.
        self._null_usage: dict[str, Any] = {"usage": None} if job.include_usage else {}

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """Return one object for the piece."""
        return (self._header.object("text_completion", [self._choice(index, piece)], **self._null_usage),)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return an object with usage and without choices."""
        return self._header.object("text_completion", [], usage=usage)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer, one choice per prompt."""
        choices = [self._choice(index, answer.joined()) for index, answer in enumerate(answers)]
        return self._header.object("text_completion", choices, usage=usage)

    def _choice(self, index: int, piece: TextPiece) -> dict[str, Any]:
        wanted = self.job.params.logprobs is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.scored, self._tokenizer) if wanted else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self.job.text.prompt_logprobs and piece.prompt_scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt_scored, self._tokenizer)
        if self.job.text.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice


_PASSED = ("model", "stream", "temperature", "top_p", "seed", "slo", "class", "priority", "timeout_s", "user", "stop",
           "cache_salt", "cache_prompt", "context_id")  # fmt: skip
"""Fields that a chat has under the same name."""


_LOGPROBS = "message.output_text.logprobs"


class ResponseText(RequestBody):
    """How the answer's text is to be."""

    unsupported: ClassVar[Unsupported] = {
        "format": (({"type": "text"},), NO_STRUCTURE),
        "verbosity": (("medium",), "say in the instructions how long answers should be"),
    }


class ResponseBody(RequestBody):
    """/v1/responses; `temperature`, `top_p`, `seed`, `stop`, `slo`, `class`, `priority`, `timeout_s`,
    `cache_salt`, `cache_prompt`, `context_id` as in a chat."""

    unsupported: ClassVar[Unsupported] = {
        "tools": (([],), NO_TOOLS),
        "tool_choice": (("none", "auto"), NO_TOOLS),
        "previous_response_id": ((), "nothing is stored: send the whole conversation as 'input'"),
        "conversation": ((), "nothing is stored: send the whole conversation as 'input'"),
        "background": ((False,), "answers are not kept: wait for this one"),
        "prompt": ((), "send the text as 'input'"),
    }

    model: str = Field(description="a name that the model is served by (GET /v1/models)")
    input: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
    ] = Field(description="text, or an array of messages: role and content (text)")
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="most output tokens")
    text: ResponseText = Field(ResponseText(), description="format: text; verbosity: medium")
    include: list[str] = Field([], max_length=16, description="message.output_text.logprobs: log-probabilities")
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="alternatives for each; needs include")
    stream: bool = Field(False, description="send the answer as server-sent events, as it comes")


def parse_response(fields: Mapping[str, Any], context: RequestContext, prompts: PromptReader) -> GenerationJob:
    """Validate a body and read it as a chat. Raises RequestError or ApiError that names the field at fault."""
    body = read_body(ResponseBody, fields)
    if isinstance(text := fields.get("text"), dict):
        for name, (allowed, why) in ResponseText.unsupported.items():
            value = without_nulls(text.get(name))
            if value is not None and value not in allowed:
                raise RequestError(f"'text.{name}' is not supported: {why}", "text")
    if other := [name for name in body.include if name != _LOGPROBS]:
        raise RequestError(f"'include' holds {other[0][:40]!r}; only {_LOGPROBS!r} is supported", "include")
    if body.top_logprobs and not body.include:
        raise RequestError(f"'top_logprobs' needs 'include': [{_LOGPROBS!r}]", "top_logprobs")
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages += _messages(body.input)
    chat: dict[str, Any] = {name: value for name in _PASSED if (value := fields.get(name)) is not None}
    chat |= {"messages": messages}
    if body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.stream:
        # The last event of a stream has the counts.
        chat["stream_options"] = {"include_usage": True}
    try:
        return parse_chat(chat, context, prompts)
    except RequestError as error:
        ours = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
        param = (error.param or "").split("[")[0].split(".")[0]
        raise RequestError(str(error).replace(param, ours.get(param, param)), ours.get(param, error.param)) from None


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError(f"'input' must be text or a non-empty array of messages, not {kind(given)}", "input")
    return [_message(item, f"input[{index}]") for index, item in enumerate(given)]


def _message(item: Any, name: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"'{name}' must be an object, not {kind(item)}", "input")
    if item.get("type") not in (None, "message"):
        raise RequestError(f"'{name}' has type {str(item['type'])[:40]!r}; only messages are supported", "input")
    content = item.get("content")
    if isinstance(content, list):
        # Parts of a message have other names here than in a chat.
        content = [_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: Any, name: str) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
        raise RequestError(f"'{name}' must be of type input_text or output_text: only text is supported", "input")
    return {"type": "text", "text": part.get("text")}


class ResponseFormat:
    """Objects of type `response`, and the events of their streams."""

    kind: Kind = "response"

    def __init__(self, job: GenerationJob, server: ServerContext, request_id: str) -> None:
        self.job = job
        self._header = AnswerHeader.of("resp", request_id, job.model)
        self._item = f"msg-{request_id}"
        self._tokenizer = server.tokenizer
        self._answer = ChoiceAnswer()
        self._sent = 0

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """Return the events of one piece: before the first those that open the message, after the last its whole."""
        events = [] if self._sent else self._opening()
        self._answer.add(piece)
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        if piece.text:
            events.append(
                self._event(
                    "response.output_text.delta", **place, delta=piece.text, logprobs=self._logprobs(piece.scored)
                )
            )
        if piece.finish is not None:
            text, scored = "".join(self._answer.text), self._logprobs(self._answer.scored)
            events += [
                self._event("response.output_text.done", **place, text=text, logprobs=scored),
                self._event("response.content_part.done", **place, part=_text_part(text, scored)),
                self._event("response.output_item.done", output_index=0, item=self._message(self._answer)),
            ]
        return events

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last event, with the whole response."""
        done = self._response(self._answer, usage)
        return self._event(f"response.{done['status']}", response=done)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer."""
        return self._response(answers[0], usage)

    def _opening(self) -> list[dict[str, Any]]:
        begun = self._response(None, None)
        message = {**self._message(ChoiceAnswer()), "status": "in_progress", "content": []}
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=message),
            self._event(
                "response.content_part.added",
                item_id=self._item,
                output_index=0,
                content_index=0,
                part=_text_part("", []),
            ),
        ]

    def _event(self, name: str, **content: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": name, "sequence_number": self._sent - 1, **content}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        if self.job.params.logprobs is None:
            return []
        found: list[dict[str, Any]] = chat_logprobs(scored, self._tokenizer)["content"]
        return found

    def _message(self, answer: ChoiceAnswer) -> dict[str, Any]:
        return {
            "id": self._item, "type": "message", "role": "assistant", "status": _status(answer),
            "content": [_text_part("".join(answer.text), self._logprobs(answer.scored))],
        }  # fmt: skip

    def _response(self, answer: ChoiceAnswer | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        status = "in_progress" if answer is None else _status(answer)
        return {
            "id": self._header.id, "object": "response", "created_at": self._header.created,
            "model": self._header.model, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if answer is None else [self._message(answer)], "parallel_tool_calls": False,
            "tool_choice": "none", "tools": [], "store": False, "temperature": self.job.params.temperature,
            "top_p": self.job.params.top_p, "metadata": {}, "usage": None if usage is None else _usage(usage),
        }  # fmt: skip


def _status(answer: ChoiceAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip
