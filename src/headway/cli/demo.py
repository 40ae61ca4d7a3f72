"""`headway demo`: one long document and a stream of chats, on Headway's policy and on first come, first served.

The model is the embedded one, which does one thing: find a passkey in a document. So answers can be checked: the
document hides one passkey, and each chat is a few lines of source code with one of its own.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.parse import duration as parse_duration
from headway.serving.load.client import LoadRequest, text_prompt
from headway.serving.load.convoy import (
    SERVE,
    ConvoyPlan,
    ConvoyRun,
    PromptSource,
    ServerUnderTest,
    convoy_json,
    parse_policies,
    report,
    serve_and_measure,
)
from headway.sim.report.tables import duration
from headway.sim.report.tables import tokens as spell
from headway.sim.workload.generate import parse_tokens

ANSWER_TOKENS = 12
NAMES = {"ladder": "Headway", "fcfs": "first come, first served"}
"""Policies as the picture calls them."""
# context beyond the document's tokens, for the answer
ROOM_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headway demo`."""
    parser.add_argument(
        "--document-tokens", type=parse_tokens, default=64_000, help="length of the document (default %(default)s)"
    )
    parser.add_argument(
        "--chat-tokens", type=parse_tokens, default=150, help="length of a chat's prompt (default %(default)s)"
    )
    parser.add_argument(
        "--chat-interval",
        type=parse_duration,
        default=0.5,
        metavar="S",
        help="seconds between chats (default %(default)s)",
    )
    parser.add_argument(
        "--policies", default="ladder,fcfs", help="what to compare: POLICY or POLICY+CHUNKING, … (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="where picture and JSON go (default %(default)s/)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which document, which passkeys (default %(default)s)")
    parser.add_argument("--server-args", default="", help="further arguments for `headway serve`, as one string")
    parser.add_argument("--server-command", help="start this instead of `headway serve`")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Return 0 only if every request was answered and every passkey was right."""
    from headway.runtime.embedded import model_path
    from headway.sim.report.plots import check_picture, convoy_figure, save
    from headway.sim.report.tables import say, show

    check_picture(args.out / "convoy")
    if not args.chat_interval > 0:
        raise ConfigError(f"--chat-interval is {args.chat_interval}; it must be above 0 seconds")
    texts = DemoTexts(str(model_path()), args.document_tokens, args.chat_tokens, args.seed)
    size = spell(texts.document_tokens)
    say(f"the document: {size} tokens of Python's standard library, with a passkey hidden at {texts.depth:.0%} of it")
    plan = ConvoyPlan(
        long_tokens=texts.document_tokens,
        long_output=ANSWER_TOKENS,
        short_tokens=args.chat_tokens,
        short_output=ANSWER_TOKENS,
        short_interval_s=args.chat_interval,
        warmup=3,
        alone=False,
        max_s=60.0,
        seed=args.seed,
    )
    served = ServerUnderTest(
        model=str(model_path()),
        max_model_len=texts.document_tokens + ROOM_TOKENS,
        arguments=tuple(shlex.split(args.server_args)),
        command=tuple(shlex.split(args.server_command)) if args.server_command else SERVE,
    )
    results, right = [], True
    answers: list[str] = []
    for spec in parse_policies(args.policies):
        # every policy gets the same chats, in the same order
        texts.restart()
        run_ = serve_and_measure(served, spec, plan, texts.prompts())
        results.append((spec, run_))
        words, good = _answers(spec.policy, run_, texts)
        answers.append(words)
        right = right and good
    data = convoy_json("embedded", plan, results)
    for line in [*_sentences(data), *answers]:
        show(line)
    status = report(data, args.out / "convoy.json")
    for written in save(convoy_figure(data, NAMES), args.out / "convoy"):
        say(f"wrote {written}")
    return status or (0 if right else 1)


class DemoTexts:
    """The document and the chats, each with its passkey; the same for every policy after `restart`."""

    def __init__(self, model: str, document_tokens: int, chat_tokens: int, seed: int) -> None:
        from headway.runtime.embedded.passkey import make_document

        count_tokens = token_counter(model)
        document = make_document(document_tokens, seed, count_tokens)
        self.passkey, self.depth = document.passkey, document.depth
        self.document_tokens = count_tokens(document.prompt)
        self._document = document.prompt
        self._chats = (make_document(chat_tokens, seed + 1 + i, count_tokens) for i in count())
        self._made: list[tuple[str, str]] = []
        self._next: Iterator[int] = count()
        self._chat_tokens = chat_tokens

    def restart(self) -> None:
        """Begin again with the first chat."""
        self._next = count()

    def prompts(self) -> PromptSource:
        """Return the convoy's prompts: the document as the long one, chats as the short ones."""
        return PromptSource(
            long=lambda: _job("document", self._document, self.document_tokens),
            short=lambda: self._chat(next(self._next)),
        )

    def _chat(self, number: int) -> LoadRequest:
        while len(self._made) <= number:
            chat = next(self._chats)
            self._made.append((chat.prompt, chat.passkey))
        return _job("chat", self._made[number][0], self._chat_tokens)

    def chat_passkey(self, number: int) -> str:
        """Return the passkey of the `number`-th chat, with which its answer must begin."""
        return self._made[number][1]


def token_counter(model: str) -> Callable[[str], int]:
    """Return a function that counts tokens with the model's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def _job(klass: str, text: str, length: int) -> LoadRequest:
    return LoadRequest(
        id="",
        klass=klass,
        prompt=text_prompt(text),
        prompt_tokens=length,
        output_tokens=ANSWER_TOKENS,
        ignore_eos=False,
        keep_text=True,
    )


def _answers(policy: str, run: ConvoyRun, texts: DemoTexts) -> tuple[str, bool]:
    """Return a sentence on the answers under one policy, and whether all were right."""
    found = [digits(convoy.long.text) for convoy in run.convoys]
    shorts = run.shorts
    # chats sent before the document have used the first passkeys
    first = len(run.shorts_alone)
    good = sum(digits(short.text) == texts.chat_passkey(first + i) for i, short in enumerate(shorts))
    document_good = all(answer == texts.passkey for answer in found)
    verdict = "right" if document_good else f"WRONG, it is {texts.passkey}"
    words = f"{policy}: passkey in the document: {', '.join(found)} ({verdict})"
    return f"{words}; chats answered right: {good} of {len(shorts)}", document_good and good == len(shorts)


def digits(text: str | None) -> str:
    """Return the number that an answer begins with; empty if there is none."""
    body = (text or "").lstrip()
    end = next((i for i, letter in enumerate(body) if not letter.isdigit()), len(body))
    return body[:end]


def _sentences(data: dict[str, Any]) -> list[str]:
    """Return the results of all policies as sentences."""
    lines = []
    for run in data["runs"]:
        short, long_s = run["short"], run["long"]["ttft_s"]["p50"]
        median, worst = duration(short["ttft_s"]["p50"]), duration(short["ttft_s"]["max"])
        lines.append(
            f"{run['policy']}, {run['chunking']}: the document was read in {duration(long_s)}; "
            f"{short['n']} chats sent meanwhile got their first token after {median} (median), {worst} at worst"
        )
    medians = [run["short"]["ttft_s"]["p50"] for run in data["runs"]]
    if len(medians) == 2 and all(medians):
        first, second = (run["policy"] for run in data["runs"])
        lines.append(f"a chat's median wait under {second} is {medians[1] / medians[0]:.1f} times that under {first}")
    return lines
