"""A tiny byte-level tokenizer, a fake engine, a client on the application, and a real server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.polling import until

from headway.serving import metrics
from headway.serving.app import create_app
from headway.serving.live import pages
from headway.serving.run import DrainingServer
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the first message must not be the assistant\\'s') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "[user] [assistant] [system]"] * 4

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(autouse=True)
def no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make metrics and the live page's data for each request."""
    monkeypatch.setattr(metrics, "RENDER_S", 0.0)
    monkeypatch.setattr(pages, "PAGE_S", 0.0)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<s> is 0, </s> is 1, the 256 bytes follow, then some merges; completions get <s> in front."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # 2 special tokens, 256 bytes, up to 62 merges.
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    # The separate template file wins over this one.
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "not this one"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def ids(tokenizer: ModelTokenizer) -> Callable[[str], list[int]]:
    """Text to token ids without special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def application(engine: FakeEngine, tokenizer: ModelTokenizer) -> Callable[..., Any]:
    """The application as an async context; keywords are settings."""

    @asynccontextmanager
    async def made(tokens: ModelTokenizer | None = None, **settings: Any) -> AsyncIterator[Any]:
        app = create_app(engine, tokens or tokenizer, ServerSettings(**settings))
        async with app.router.lifespan_context(app):
            yield app

    return made


@pytest.fixture
def connect(application: Callable[..., Any]) -> Connect:
    """A client of the application without a socket; keywords are settings."""

    @asynccontextmanager
    async def made(tokens: ModelTokenizer | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        async with application(tokens, **settings) as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield client

    return made


@pytest.fixture
def live(tokenizer: ModelTokenizer) -> Callable[..., Any]:
    """A uvicorn server in a thread; yields its address."""

    @contextmanager
    def made(engine: FakeEngine, **settings: Any) -> Iterator[str]:
        chosen = ServerSettings(port=0, **settings)
        server = DrainingServer(create_app(engine, tokenizer, chosen), chosen)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: server.started, 10.0)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)

    return made
