"""/v1/completions: request parsing and answer format. A batch of prompts is answered as choices 0, 1, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.errors import RequestError
from headway.serving.answer import AnswerHeader, ChoiceAnswer
from headway.serving.answer_pieces import TextPiece
from headway.serving.context import ServerContext
from headway.serving.generation_job import GenerationJob, RequestContext, build_job, prepared_context, read_model
from headway.serving.journaled_request import Kind
from headway.serving.logprobs import ScoredToken, completion_logprobs, prompt_logprobs
from headway.serving.prompts import PromptReader
from headway.serving.request_bodies import CompletionBody, read_body
from headway.serving.sampling_fields import sampling_params

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
        choice = self._choice(
            index, piece.text, piece.scored, piece.finish, piece.stop_reason, piece.tokens, piece.prompt_scored
        )
        return (self._header.object("text_completion", [choice], **self._null_usage),)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return an object with usage and without choices."""
        return self._header.object("text_completion", [], usage=usage)

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the complete answer, one choice per prompt."""
        choices = [
            self._choice(
                index, "".join(one.text), one.scored, one.finish, one.stop_reason, one.tokens, one.prompt_scored
            )
            for index, one in enumerate(answers)
        ]
        return self._header.object("text_completion", choices, usage=usage)

    def _choice(
        self, index: int, text: str, scored: Sequence[ScoredToken], finish: str | None, reason: str | int | None,
        tokens: Sequence[int], prompt_scored: Sequence[ScoredToken] | None,
    ) -> dict[str, Any]:  # fmt: skip
        wanted = self.job.params.logprobs is not None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(scored, self._tokenizer) if wanted else None,
            "finish_reason": finish,
            "stop_reason": reason,
        }
        if self.job.text.prompt_logprobs and prompt_scored is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt_scored, self._tokenizer)
        if self.job.text.return_token_ids:
            choice["token_ids"] = tokens
        return choice
