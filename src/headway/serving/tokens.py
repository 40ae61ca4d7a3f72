"""/tokenize and /detokenize: conversion between text and token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.serving.chat import render_prompt
from headway.serving.context import context
from headway.serving.errors import json_response
from headway.serving.generation_job import RequestContext, read_model
from headway.serving.prompts import PromptReader
from headway.serving.request_bodies import DetokenizeBody, TokenizeBody, body_schema, read_body
from headway.serving.tokenizer import ModelTokenizer

router = APIRouter()


@router.post("/tokenize", response_model=None, openapi_extra=body_schema(TokenizeBody), summary="Text to token ids")
async def tokenize(request: Request) -> Response:
    """`prompt` (text, with the special tokens that completions add) or `messages` (through the chat template)."""
    return await context(request).parse(request, _tokenize)


@router.post("/detokenize", response_model=None, openapi_extra=body_schema(DetokenizeBody), summary="Token ids to text")
async def detokenize(request: Request) -> Response:
    """`tokens` as text, special tokens included; at most as many as the model's context holds."""
    return await context(request).parse(request, _detokenize)


# Both build the response too: a million ids as JSON would keep the event loop for some 20 ms.
def _tokenize(fields: Mapping[str, Any], asked: RequestContext, prompts: PromptReader) -> Response:
    _check_model(fields, asked)
    body = read_body(TokenizeBody, fields)
    # Messages win when both are given.
    if body.messages is not None:
        prompt = render_prompt(body, body.messages, prompts)
    elif body.prompt is not None:
        prompt = prompts.text(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        raise RequestError("'prompt' (text) or 'messages' is required", "prompt")
    tokens = array("i", prompt.data.tobytes()).tolist()
    answer: dict[str, Any] = {"count": prompt.tokens, "max_model_len": asked.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [_shown(prompts.tokenizer, token) for token in tokens]
    return json_response(answer)


def _detokenize(fields: Mapping[str, Any], asked: RequestContext, prompts: PromptReader) -> Response:
    _check_model(fields, asked)
    ids = prompts.token_ids(read_body(DetokenizeBody, fields).tokens, "tokens")
    if not prompts.tokenizer.has_text:
        raise RequestError("this model has no tokenizer", "tokens")
    return json_response({"prompt": prompts.tokenizer.decode(ids)})


def _check_model(fields: Mapping[str, Any], asked: RequestContext) -> None:
    """Validate the model's name where it is given; it is optional here. Raises RequestError or ApiError."""
    if "model" in fields:
        read_model(fields, asked.models)


def _shown(tokenizer: ModelTokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
