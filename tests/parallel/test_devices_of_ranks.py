"""Where workers compute: what is chosen, what is refused, and SDPA in place of the CPU's own kernels.

On CUDA where there is a device (never run by us so far); on CPU in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import quick_first
from tests.parallel.model_families import BLOCK, BLOCKS, checkpoint, core_of, expected, layout_of
from tests.parallel.rank_processes import make_rank_config, rank_executor
from tests.parallel.rank_serving import Ask, make_core, serve
from tests.parallel.virtual_ranks import VirtualWorld

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.perf.device import CudaReport, DeviceAssignment, choose, has_driver
from headway.runtime.assembly.single_process import SingleProcessExecutor
from headway.runtime.attention.backends import SdpaBackend
from headway.runtime.executor import profiling as cuda
from headway.runtime.executor.worker import GroupAttention, ModelWorker
from headway.runtime.model.loading import load_decoder

ASKS = [Ask(prompt_of(1, 200), 8), Ask(prompt_of(2, 20), 10, 2), Ask(prompt_of(3, 3), 12, 5)]
PAIR = CudaReport("2.9+cu130", True, ("A", "B"), (50, 30))


def needs(devices: int) -> Any:
    have = torch.cuda.device_count()
    return pytest.mark.skipif(have < devices, reason=f"CUDA devices: it takes {devices}, and there are {have}")


def never() -> NoReturn:
    raise AssertionError("nobody had to ask torch")


def driver() -> bool:
    return True


def no_driver() -> bool:
    return False


def test_auto_is_the_cpu_unless_every_worker_has_a_device() -> None:
    assert choose("auto", 1, never, no_driver) is None
    assert choose("cpu", 1, never, no_driver) is None
    assert choose("cpu", 1, never, driver) is None
    assert choose("auto", 2, lambda: PAIR, driver) == DeviceAssignment(0, "A", 30)
    assert choose("auto", 3, lambda: PAIR, driver) is None
    assert choose("auto", 1, lambda: CudaReport("2.9+cpu"), driver) is None


@pytest.mark.parametrize(("file", "there"), [("/", True), ("/there is none", False)])
def test_a_driver_is_known_by_its_files(file: str, there: bool) -> None:
    assert has_driver(("/there is none", file)) == there


def test_cuda_is_asked_for_by_number() -> None:
    assert choose("cuda", 1, lambda: PAIR) == DeviceAssignment(0, "A", 50)
    assert choose("cuda:1", 1, lambda: PAIR) == DeviceAssignment(1, "B", 30)


@pytest.mark.parametrize(
    ("asked", "workers", "found", "words"),
    [
        ("cuda", 1, CudaReport("2.9+cpu"), "torch 2.9+cpu has no CUDA: install a CUDA build of torch"),
        ("cuda", 1, CudaReport("2.9+cu130", True), "torch 2.9+cu130 finds no CUDA device"),
        ("cuda", 3, PAIR, "3 workers on this host need as many CUDA devices, from number 0 on, and there are 2"),
        ("cuda:2", 1, PAIR, "1 worker on this host need as many CUDA devices, from number 2 on, and there are 2"),
        ("gpu", 1, PAIR, "auto, cpu, cuda or cuda:N, not 'gpu'"),
        ("cuda:-1", 1, PAIR, "not 'cuda:-1'"),
    ],
)
def test_an_impossible_setting_names_its_reason(asked: str, workers: int, found: CudaReport, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(asked, workers, lambda: found)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("look", [cuda.look, cuda.look_apart])
def test_torch_reports_the_devices(look: Callable[[], CudaReport]) -> None:
    found = look()
    assert found.torch == torch.__version__
    assert found.built == (torch.version.cuda is not None)
    assert len(found.names) == len(found.free_bytes) == torch.cuda.device_count()


def test_a_failing_device_query_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.sys, "executable", "/bin/false")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be asked"):
        cuda.look_apart()


def test_a_wrong_device_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--device", "gpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_rank_has_a_device_of_its_host() -> None:
    config = make_rank_config(checkpoint("llama"), 2, 2)
    assert [config.device(rank) for rank in range(4)] == ["cpu"] * 4
    alone = make_rank_config(checkpoint("llama"), 2, 2, cuda=1)
    assert [alone.device(rank) for rank in range(4)] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    spread = make_rank_config(checkpoint("llama"), 2, 2, cuda=0, nodes=2)
    assert [spread.device(rank) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs(1))])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_process_over_sdpa_equals_transformers(family: str, place: str) -> None:
    decoder = load_decoder(checkpoint(family), device=place, backend=SdpaBackend())
    executor = SingleProcessExecutor(ModelWorker(decoder, BLOCKS, BLOCK, ()))
    wanted = [expected(family, seed, len(ask.prompt), ask.count) for seed, ask in enumerate(ASKS, start=1)]
    assert serve(make_core(executor, BLOCKS, BLOCK), ASKS) == wanted


def test_kv_groups_share_requests_over_sdpa() -> None:
    layout = layout_of("S2K2")
    with VirtualWorld(checkpoint("llama"), layout, BLOCKS, BLOCK) as world:
        for worker in world.workers:
            assert isinstance(worker.decoder.backend, GroupAttention)
            worker.decoder.backend.inner = SdpaBackend()
        got = serve(core_of(world.executor, shard_tokens=96), ASKS)
    assert got == [expected("llama", seed, len(ask.prompt), ask.count) for seed, ask in enumerate(ASKS, start=1)]


@pytest.mark.parametrize("name", quick_first(["T2", "S2", "K2"]))
@pytest.mark.parametrize("first", [pytest.param(None, id="cpu"), pytest.param(0, id="cuda", marks=needs(2))])
def test_ranks_over_sdpa_equal_transformers(name: str, first: int | None) -> None:
    layout = layout_of(name)
    config = make_rank_config(
        checkpoint("llama"), layout.tp, layout.stages, kvp=layout.kvp, attention_backend="sdpa", cuda=first
    )
    with rank_executor(config) as (executor, _):
        got = serve(core_of(executor, shard_tokens=96), ASKS)
        assert executor.measure("forward", 4, 0, 1) > 0.0
    assert got == [expected("llama", seed, len(ask.prompt), ask.count) for seed, ask in enumerate(ASKS, start=1)]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_a_rank_without_its_device_ends_with_one_line() -> None:
    words = r"worker [01] shall compute on cuda:[01], and this host has 0"
    with pytest.raises(ConfigError, match=words), rank_executor(make_rank_config(checkpoint("llama"), 2, 1, cuda=0)):
        pass
