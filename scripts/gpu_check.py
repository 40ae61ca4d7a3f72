"""Check Headway on a machine with one CUDA GPU, within eight minutes and without a network.

    python scripts/gpu_check.py --wheels              # packages to carry to a machine that has only torch
    python scripts/gpu_check.py --out out/gpu-check   # run all parts; writes check.json and check.md

Needs Python 3.11 or later, torch 2.11 or later with CUDA, and the packages of `--wheels`. Parts, in order: the device's
own limits (copy bandwidth, bf16 products), equality with the CPU (logits and greedy tokens of random checkpoints under
several chunkings), prefill and decode of the reference shape beside those limits, the CUDA tests of this repository
(where pytest and transformers are installed), and the convoy. A part that fails is recorded with its error, and the
next part runs. Exit code: 0 all parts passed, 1 a part failed, 75 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WHEELS = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio", "attrs", "click",
    "fastapi", "frozenlist", "h11", "hf-xet", "httpcore2", "httpx2", "huggingface-hub", "idna", "jinja2",
    "markdown-it-py", "markupsafe", "mdurl", "msgspec", "multidict", "numpy", "opentelemetry-api", "packaging",
    "prometheus-client", "propcache", "pydantic", "pydantic-core", "pygments", "pyyaml", "pyzmq", "rich",
    "safetensors", "starlette", "tokenizers", "tqdm", "truststore", "typing-inspection", "uvicorn", "yarl",
)  # fmt: skip
"""Packages that the product and this script import besides torch (about 35 MB): names of the `serve` extra's lock."""
NO_DEVICE = 75
LIMIT_S = 480.0
CHUNKINGS = ((701,), (256, 256, 189), (1, 300, 400), (512, 188, 1))
PREFILLS = ((2048, 0), (2048, 30_720), (8192, 0))
"""Chunks to time: new tokens, tokens before them."""
DECODES = ((1, 1024), (32, 1024), (1, 65_536), (8, 32_768))
"""Decode steps to time: requests, tokens that each holds."""

Part = Callable[[], dict[str, Any]]


class CudaChecks:
    """The parts that need a device. `device` is "cuda" except in tests of this script."""

    def __init__(self, device: str, out: Path) -> None:
        import torch

        self.torch, self.device, self.out = torch, device, out
        self.bandwidth = self.flops = 0.0

    def seconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Return the median seconds of `repeats` runs, each waited for, after three to warm up."""
        times = []
        for number in range(repeats + 3):
            began = time.perf_counter()
            run()
            if self.device == "cuda":
                self.torch.cuda.synchronize()
            if number >= 3:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def limits(self, megabytes: int = 4096, size: int = 8192) -> dict[str, Any]:
        """Measure what the device can at best: bytes a second of a copy, operations a second of a bf16 product."""
        torch = self.torch
        source = torch.randn(megabytes * 2**18, device=self.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * size**3 / self.seconds(lambda: left @ right)
        return {"copy_bytes_per_s": self.bandwidth, "bf16_flop_per_s": self.flops}

    def equality(self) -> dict[str, Any]:
        """Compare logits and 32 greedy tokens with the CPU's, for every chunking and both types. Raises on a miss."""
        torch = self.torch
        folder = self.checkpoint("parity", "--hidden", "256", "--layers", "4", "--heads", "4", "--mlp", "512",
                                 "--vocab", "512", "--dtype", "float32")  # fmt: skip
        tokens = torch.randint(3, 512, (sum(CHUNKINGS[0]),), generator=torch.Generator().manual_seed(1))
        wanted, answer = self.generate(folder, "cpu", "float32", tokens, CHUNKINGS[0])
        worst: dict[str, float] = {}
        for dtype, bound in (("float32", 2e-4), ("bfloat16", 6e-2)):
            for chunks in CHUNKINGS:
                got, ours = self.generate(folder, self.device, dtype, tokens, chunks)
                error = float((got - wanted).abs().max() / wanted.abs().max())
                worst[dtype] = max(worst.get(dtype, 0.0), error)
                if not error <= bound:
                    raise AssertionError(f"{dtype}, chunks {chunks}: logits differ by {error:.2g} of the largest")
                if dtype == "float32" and ours != answer:
                    raise AssertionError(f"float32, chunks {chunks}: other greedy tokens than on the CPU")
        return {"chunkings": len(CHUNKINGS), "logit_error": worst, "greedy_tokens_equal": True}

    def generate(
        self, folder: Path, device: str, dtype: str, tokens: Any, chunks: Sequence[int], count: int = 32
    ) -> tuple[Any, list[int]]:
        """Return the prompt's last logits (vocab,) on the CPU, and greedy tokens, of a prompt computed in chunks."""
        from headway.runtime.attention.backend import BatchSegment

        torch, decoder = self.torch, self.load(folder, device, dtype)
        slots = len(tokens) + count
        pool = decoder.make_pool(slots)

        def step(new: Any, past: int) -> Any:
            plan = decoder.backend.plan([BatchSegment(0, len(new), past, ((0, slots),))], pool)
            rows = torch.tensor([len(new) - 1], device=decoder.device)
            return decoder.forward(new, torch.arange(past, past + len(new)), plan, rows)[0].cpu()

        past = 0
        for size in chunks:
            logits = step(tokens[past : past + size], past)
            past += size
        first, answer = logits, [int(logits.argmax())]
        while len(answer) < count:
            answer.append(int(step(torch.tensor(answer[-1:]), past + len(answer) - 1).argmax()))
        return first, answer

    def load(self, folder: Path, device: str, dtype: str) -> Any:
        """Return a decoder over torch's attention kernels, or over the CPU's own for the reference."""
        from headway.runtime.attention.backends import make_backend
        from headway.runtime.model.loading import load_decoder

        backend = make_backend("cpu" if device == "cpu" else "sdpa")
        return load_decoder(folder, dtype=dtype, device=device, backend=backend)

    def speed(
        self, prefills: Sequence[tuple[int, int]] = PREFILLS, decodes: Sequence[tuple[int, int]] = DECODES
    ) -> dict[str, Any]:
        """Time chunks and decode steps of the reference shape (27M parameters, bf16) beside the device's limits."""
        from headway.runtime.attention.backend import BatchSegment

        torch = self.torch
        decoder = self.load(self.checkpoint("reference"), self.device, "bfloat16")
        config, rows = decoder.config, {}
        weights = decoder.weights.parameters
        heads = config.q_heads * config.head_dim
        for new, past in prefills:
            pool = decoder.make_pool(new + past)
            plan = decoder.backend.plan([BatchSegment(0, new, past, ((0, new + past),))], pool)
            tokens, positions = torch.zeros(new, dtype=torch.int64), torch.arange(past, past + new)
            last = torch.tensor([new - 1], device=decoder.device)
            took = self.seconds(lambda: decoder.forward(tokens, positions, plan, last), 10)  # noqa: B023
            keys = new * past + new * (new + 1) / 2
            work = 2 * weights * new + 4 * config.layers * heads * keys
            least = max(work / self.flops, 2 * weights / self.bandwidth)
            rows[f"prefill {new} over {past}"] = _beside(took, least)
        for count, held in decodes:
            pool = decoder.make_pool(count * (held + 1))
            segments = [BatchSegment(i, 1, held, ((i * (held + 1), held + 1),)) for i in range(count)]
            plan = decoder.backend.plan(segments, pool)
            tokens, positions = torch.zeros(count, dtype=torch.int64), torch.full((count,), held)
            took = self.seconds(lambda: decoder.forward(tokens, positions, plan, None))  # noqa: B023
            kv = count * held * 4 * config.layers * config.kv_heads * config.head_dim
            rows[f"decode {count} of {held}"] = _beside(took, (2 * weights + kv) / self.bandwidth)
        return rows

    def convoy(self) -> dict[str, Any]:
        """Run the convoy (chats behind one long prompt) on the device: the default policy, and first come."""
        report = self.out / "convoy.json"
        model = self.checkpoint("reference")
        _call([sys.executable, "-m", "headway.cli.main", "bench", "convoy", "--model", str(model),
               "--server-args", f"--device {self.device}", "--long-tokens", "65536",
               "--json", str(report)])  # fmt: skip
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def checkpoint(self, name: str, *shape: str) -> Path:
        """Make a random checkpoint by scripts/make_checkpoint.py, once; return its folder."""
        folder = self.out / name
        if not folder.exists():
            _call([sys.executable, str(ROOT / "scripts" / "make_checkpoint.py"), *shape, "--out", str(folder)])
        return folder


def tests() -> dict[str, Any]:
    """Run the repository's CUDA tests. Skipped, with the reason, where their packages are missing."""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis", "transformers") if not _installed(name)]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    files = ("attention/test_devices.py", "attention/test_sdpa.py", "parallel/test_devices_of_ranks.py")
    command = [sys.executable, "-m", "pytest", "-k", "cuda", *(str(ROOT / "tests" / name) for name in files)]
    return {"result": _call(command).strip().splitlines()[-1]}


def run_parts(parts: dict[str, Part], until_s: float) -> dict[str, Any]:
    """Run the parts in order until `until_s` on the monotonic clock; a failed part is recorded with its error."""
    results: dict[str, Any] = {}
    for name, part in parts.items():
        began = time.monotonic()
        if began >= until_s:
            results[name] = {"skipped": "no time was left"}
            continue
        try:
            results[name] = part()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        results[name]["took_s"] = round(time.monotonic() - began, 1)
        print(f"{name}: {json.dumps(results[name])[:300]}", flush=True)
    return results


def page(facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the results as a Markdown page: a section for each part, a row for each figure."""
    lines = ["# GPU check", "", ", ".join(f"{name} {value}" for name, value in facts.items())]
    for name, result in results.items():
        lines += ["", f"## {name}", "", "| figure | value |", "|---|---|"]
        lines += [f"| {key} | {_shown(value)} |" for key, value in result.items()]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and len(value) <= 4:
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _beside(took_s: float, least_s: float) -> dict[str, float]:
    return {"ms": took_s * 1e3, "limit_ms": least_s * 1e3, "share_of_limit": least_s / took_s}


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _call(command: Sequence[str]) -> str:
    """Run a command in the repository; return what it printed. Raises RuntimeError with its last lines if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        tail = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise RuntimeError(f"{' '.join(command[:4])} … ended with {done.returncode}: {' / '.join(tail)}")
    return done.stdout


def device_facts() -> dict[str, Any]:
    """Return what the report says of the machine. "device" is missing where torch or a CUDA device is."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    if not _installed("torch"):
        return facts | {"torch": "is not installed"}
    import torch

    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(), "memory_gib": torch.cuda.mem_get_info()[1] >> 30}
    return facts


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-check", help="folder for the results")
    parser.add_argument("--wheels", action="store_true", help="list the packages that are needed besides torch")
    options = parser.parse_args(words)
    if options.wheels:
        print("\n".join(WHEELS))
        return 0
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts, results = device_facts(), {}
    if "device" in facts:
        checks = CudaChecks("cuda", out)
        parts: dict[str, Part] = {
            "limits": checks.limits,
            "equality": checks.equality,
            "speed": checks.speed,
            "tests": tests,
            "convoy": checks.convoy,
        }
        results = run_parts(parts, time.monotonic() + LIMIT_S)
    (out / "check.json").write_text(json.dumps({"machine": facts, "parts": results}, indent=1) + "\n")
    (out / "check.md").write_text(page(facts, results))
    if not results:
        print("There is no CUDA device here: run this on a machine with one, and with a CUDA build of torch.")
        return NO_DEVICE
    print(out / "check.md")
    return int(any("error" in result for result in results.values()))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    sys.exit(main())
